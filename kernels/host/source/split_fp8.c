/* Split FP8 matrices, joined to blocks of F8_E4M3: their rows are divided among threads. */
#include <string.h>

#include "host.h"
#include "threads.h"

enum { NUMBERS = 128, HIGH_BYTES = 84, BLOCK_BYTES = 132, SIGNS = 4, CODES = 20 };

/* The number of a code without its sign; `low` are its low bits. */
static uint8_t magnitude(int code, int base, uint8_t low) {
    if (code >= 4) return (uint8_t)((base - 3 + (code >> 2)) << 3 | (code & 3) << 1 | low);
    if (code >= 2) return (uint8_t)((base - 3) << 3 | (code & 1) << 2 | low);
    return code ? (uint8_t)((base - 4) << 3 | low) : low;
}

/* A damaged matrix cannot make it read elsewhere. */
static void join_row(const JoinedFP8 *j, int64_t row) {
    static const uint8_t lengths[16] = {7, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const uint8_t *high = j->high + row * j->blocks * HIGH_BYTES;
    uint8_t *out = j->out + row * j->blocks * BLOCK_BYTES;
    uint64_t place = 8 * (uint64_t)(uint32_t)j->starts[row], last = (uint64_t)j->room - 1;
    for (int64_t b = 0; b < j->blocks; b++, high += HIGH_BYTES, out += BLOCK_BYTES) {
        int base = j->bases[row * j->blocks + b];
        for (int i = 0; i < NUMBERS; i++) {
            int code = high[CODES + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
            uint64_t at = place / 8 < last ? place / 8 : last, next = at < last ? at + 1 : last;
            unsigned pair = j->low[at] | (unsigned)j->low[next] << 8;
            uint8_t low = pair >> place % 8 & ((1u << lengths[code]) - 1);
            place += lengths[code];
            int sign = high[SIGNS + i / 8] >> i % 8 & 1;
            out[i] = (uint8_t)(sign << 7 | magnitude(code, base, low));
        }
        /* 2^(13 - base). */
        uint32_t bits = (uint32_t)(127 + 13 - base) << 23;
        float scale, power;
        memcpy(&scale, high, 4);
        memcpy(&power, &bits, 4);
        scale *= power;
        memcpy(out + NUMBERS, &scale, 4);
    }
}

static void joined_part(const void *job, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) join_row(job, row);
}

EXPORT void triforce_join_fp8(const JoinedFP8 *j, int threads) {
    divide(joined_part, j, j->rows, rows_at_once(j->blocks * NUMBERS), threads);
}

EXPORT int triforce_size_of_joinedfp8(void) { return sizeof(JoinedFP8); }
