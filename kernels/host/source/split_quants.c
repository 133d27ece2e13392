/* Split blocks of GGUF's types: splitting them, and joining them again. See `high_quants.py` for where
   bits are. */
#include <string.h>

#include "host.h"
#include "threads.h"

/* Blocks that a thread joins at a time. */
enum { JOINED_AT_ONCE = 256 };

/* A part of 128 numbers: 64 bytes of 4 bits each, and 32 with 2 bits of four numbers each. */
static void join_q6_k(const uint8_t *high, const uint8_t *low, uint8_t *fours, uint8_t *upper) {
    for (int i = 0; i < 32; i++) {
        uint8_t a = high[i], b = high[32 + i], bits = low[i];
        fours[i] = (uint8_t)((a & 3) << 2 | (bits & 3) | (a & 0x30) << 2 | (bits & 0x30));
        fours[32 + i] = (uint8_t)((b & 3) << 2 | (bits >> 2 & 3) | (b & 0x30) << 2 | (bits >> 2 & 0x30));
        upper[i] = (uint8_t)((a >> 2 & 3) | (b & 12) | (a >> 2 & 0x30) | (b & 0xc0));
    }
}

static void split_q6_k(const uint8_t *fours, const uint8_t *upper, uint8_t *high, uint8_t *low) {
    for (int i = 0; i < 32; i++) {
        uint8_t a = fours[i], b = fours[32 + i], bits = upper[i];
        high[i] = (uint8_t)((a >> 2 & 0x33) | (bits & 3) << 2 | (bits & 0x30) << 2);
        high[32 + i] = (uint8_t)((b >> 2 & 0x33) | (bits & 12) | (bits & 0xc0));
        low[i] = (uint8_t)((a & 0x33) | (b & 0x33) << 2);
    }
}

static void join_q5_k(const uint8_t *high, const uint8_t *low, uint8_t *out) {
    memcpy(out, high, 16);
    for (int i = 0; i < 32; i++) {
        uint8_t fifth = 0;
        for (int pair = 0; pair < 4; pair++) {
            uint8_t here = high[16 + 32 * pair + i], bits = low[i] >> 2 * pair;
            out[48 + 32 * pair + i] = (uint8_t)((here & 0x77) << 1 | (bits & 1) | (bits & 2) << 3);
            fifth |= (uint8_t)((here >> 3 & 1) | (here >> 6 & 2)) << 2 * pair;
        }
        out[16 + i] = fifth;
    }
}

static void split_q5_k(const uint8_t *in, uint8_t *high, uint8_t *low) {
    memcpy(high, in, 16);
    for (int i = 0; i < 32; i++) {
        uint8_t bits = 0;
        for (int pair = 0; pair < 4; pair++) {
            uint8_t four = in[48 + 32 * pair + i], fifth = in[16 + i] >> 2 * pair;
            high[16 + 32 * pair + i] =
                (uint8_t)((four >> 1 & 0x77) | (fifth & 1) << 3 | (fifth & 2) << 6);
            bits |= (uint8_t)((four & 1) | (four >> 3 & 2)) << 2 * pair;
        }
        low[i] = bits;
    }
}

static void joined_part(const void *job, int64_t first, int64_t end) {
    const JoinedQuants *j = job;
    for (int64_t b = first; b < end; b++) {
        if (j->format == Q6_K) {
            const uint8_t *high = j->high + 146 * b, *low = j->low + 64 * b;
            uint8_t *out = j->out + 210 * b;
            for (int half = 0; half < 2; half++)
                join_q6_k(high + 64 * half, low + 32 * half, out + 64 * half, out + 128 + 32 * half);
            memcpy(out + 192, high + 128, 18);
        } else {
            join_q5_k(j->high + 144 * b, j->low + 32 * b, j->out + 176 * b);
        }
    }
}

EXPORT void triforce_join_quants(const JoinedQuants *j, int threads) {
    divide(joined_part, j, j->blocks, JOINED_AT_ONCE, threads);
}

/* Splits the blocks in `out` into all else, in one thread: loading has several. */
EXPORT void triforce_split_quants(const JoinedQuants *j) {
    for (int64_t b = 0; b < j->blocks; b++) {
        if (j->format == Q6_K) {
            const uint8_t *in = j->out + 210 * b;
            uint8_t *high = (uint8_t *)j->high + 146 * b, *low = (uint8_t *)j->low + 64 * b;
            for (int half = 0; half < 2; half++)
                split_q6_k(in + 64 * half, in + 128 + 32 * half, high + 64 * half, low + 32 * half);
            memcpy(high + 128, in + 192, 18);
        } else {
            split_q5_k(j->out + 176 * b, (uint8_t *)j->high + 144 * b, (uint8_t *)j->low + 32 * b);
        }
    }
}

EXPORT int triforce_size_of_joinedquants(void) { return sizeof(JoinedQuants); }
