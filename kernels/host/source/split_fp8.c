/* Split FP8 matrices: splitting blocks of F8_E4M3, and joining them again, whose rows are divided among
   threads. */
#include <string.h>

#include "host.h"
#include "threads.h"

enum { NUMBERS = 128, HIGH_BYTES = 84, BLOCK_BYTES = 132, SIGNS = 4, CODES = 20 };
/* As in `split_fp8.py`. */
enum { LEAST_BASE = 5, SCALED_BASE = 13 };

/* 2^exponent, of a normal number. */
static float power_of_two(int exponent) {
    uint32_t bits = (uint32_t)(127 + exponent) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
}

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
        float scale;
        memcpy(&scale, high, 4);
        scale *= power_of_two(SCALED_BASE - base);
        memcpy(out + NUMBERS, &scale, 4);
    }
}

static void joined_part(const void *job, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) join_row(job, row);
}

EXPORT void triforce_join_fp8(const JoinedFP8 *j, int threads) {
    divide(joined_part, j, j->rows, rows_at_once(j->blocks * NUMBERS), threads);
}

static int code_of(int magnitude, int base, int *length) {
    int below = base - (magnitude >> 3);
    *length = below < 3 ? 1 : below == 3 ? 2 : below == 4 ? 3 : 7;
    if (below < 3) return (3 - below) * 4 + (magnitude >> 1 & 3);
    return below == 3 ? 2 + (magnitude >> 2 & 1) : below == 4;
}

/* Splits the blocks in `out` into all else, in one thread: loading has several. Returns the bytes of
   the low bits, -1 if they have no room, -2 if a scale cannot be divided. */
EXPORT int64_t triforce_split_fp8(const JoinedFP8 *j) {
    uint8_t *high = (uint8_t *)j->high, *bases = (uint8_t *)j->bases, *low = (uint8_t *)j->low;
    int32_t *starts = (int32_t *)j->starts;
    const uint8_t *in = j->out;
    int64_t used = 0;
    starts[0] = 0;
    for (int64_t row = 0; row < j->rows; row++) {
        uint32_t bits = 0;
        int held = 0;
        for (int64_t b = 0; b < j->blocks; b++, in += BLOCK_BYTES, high += HIGH_BYTES, bases++) {
            int base = LEAST_BASE;
            for (int i = 0; i < NUMBERS; i++)
                if ((in[i] >> 3 & 15) > base) base = in[i] >> 3 & 15;
            float scale, scaled;
            memcpy(&scale, in + NUMBERS, 4);
            scaled = scale * power_of_two(base - SCALED_BASE);
            if (!(scaled * power_of_two(SCALED_BASE - base) == scale)) return -2;
            memset(high, 0, HIGH_BYTES);
            memcpy(high, &scaled, 4);
            *bases = (uint8_t)base;
            for (int i = 0; i < NUMBERS; i++) {
                int magnitude = in[i] & 127, length, code = code_of(magnitude, base, &length);
                high[SIGNS + i / 8] |= (uint8_t)(in[i] >> 7 << i % 8);
                high[CODES + i / 64 * 32 + i % 32] |= (uint8_t)(code << i / 32 % 2 * 4);
                bits |= (uint32_t)(magnitude & ((1 << length) - 1)) << held;
                for (held += length; held >= 8; held -= 8, bits >>= 8) {
                    if (used == j->room) return -1;
                    low[used++] = (uint8_t)bits;
                }
            }
        }
        if (held) {
            if (used == j->room) return -1;
            low[used++] = (uint8_t)bits;
        }
        starts[row + 1] = (int32_t)used;
    }
    return used;
}

EXPORT int triforce_size_of_joinedfp8(void) { return sizeof(JoinedFP8); }
