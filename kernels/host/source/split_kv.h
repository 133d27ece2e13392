/* Split blocks of keys and values, decoded to bfloat16. See `triforce_kernels.kv.split_kv`. */
#pragma once

#include "host.h"
#include "split.h"
#include "vectors.h"

/* Lower halves of the integers of a vector. */
INLINE void store_halves(uint16_t *at, vi v) {
    typedef uint16_t narrow __attribute__((vector_size(2 * W), aligned(2), may_alias));
    *(narrow *)at = __builtin_convertvector(v, narrow);
}

/* Numbers `first` to `end` of a row, all in one half of it. bits: the byte of the low bits of number
   0, which are its upper 4 bits if `upper` */
INLINE void decode_half(const uint8_t *high, const uint8_t *base, const uint8_t *bits, int upper,
                        int64_t first, int64_t end, uint16_t *out) {
    int64_t i = first;
    for (; i + W <= end; i += W) {
        vi more = upper ? unsigned_bytes(bits + i) >> 4 : unsigned_bytes(bits + i) & 15;
        vi least = (unsigned_bytes(base + i) - BELOW) * 128;
        store_halves(out + i, coded(unsigned_bytes(high + i), least, all_int(0), all_int(0)) | more);
    }
    for (; i < end; i++) {
        int more = upper ? bits[i] >> 4 : bits[i] & 15;
        out[i] = coded_one(high[i], (base[i] - BELOW) * 128, 0, 0) | (uint16_t)more;
    }
}

/* Decodes rows `first` to `end` of a block's heads, without their exceptions. */
static void decode_kv(const KVBlock *b, int64_t first, int64_t end) {
    int64_t dim = b->head_dim, half = dim / 2;
    for (int64_t row = first; row < end; row++) {
        int64_t head = row / b->tokens, token = row % b->tokens;
        const uint8_t *high = b->high + row * dim, *low = b->low + row * half;
        const uint8_t *base = b->base + head * dim;
        uint16_t *out = b->out + head * b->out_head + token * b->out_row;
        decode_half(high, base, low, 0, 0, half, out);
        decode_half(high, base, low - half, 1, half, dim, out);
    }
}
