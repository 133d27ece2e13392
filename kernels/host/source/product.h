/* Products of up to MOST_ROWS rows with a weight in any format, summed in float32.

   Some columns of DECODED rows of the weight are decoded into a buffer that stays in the first
   cache, then multiplied by all rows. The order of a sum depends on the number of columns alone:
   lane l of the one accumulator of a row and an output takes columns l, l + W, ... So a row has the
   same bits whatever stands beside it, and whichever thread computes it. */
#pragma once

#include "blocks.h"
#include "host.h"
#include "split.h"

/* Columns that are decoded at a time: all of a short row, else SEGMENT of them. */
enum { SEGMENT = 512, LONGEST = 640, OUTPUTS = 4, DECODED = 2 * OUTPUTS };
#if defined(AVX512) || defined(NEON)
enum { TOGETHER = 4 };
#else
enum { TOGETHER = 2 };
#endif

/* Decodes a part of a row of a weight; a multiple of 256 columns, or up to the last one. */
static void decode(const Weight *w, int64_t row, int64_t first, int64_t count, float *out) {
#define BLOCKS(NAME, function, elements, nbytes) \
    case NAME: \
        function(w->data + row * w->stride + first / elements * nbytes, count, out); \
        return;
    switch (w->format) {
        BLOCKS(F16, decode_f16, 1, 2)
        BLOCKS(BF16, decode_bf16, 1, 2)
        BLOCKS(Q4_0, decode_q4_0, 32, 18)
        BLOCKS(Q4_1, decode_q4_1, 32, 20)
        BLOCKS(Q5_0, decode_q5_0, 32, 22)
        BLOCKS(Q5_1, decode_q5_1, 32, 24)
        BLOCKS(Q8_0, decode_q8_0, 32, 34)
        BLOCKS(Q2_K, decode_q2_k, 256, 84)
        BLOCKS(Q3_K, decode_q3_k, 256, 110)
        BLOCKS(Q4_K, decode_q4_k, 256, 144)
        BLOCKS(Q5_K, decode_q5_k, 256, 176)
        BLOCKS(Q6_K, decode_q6_k, 256, 210)
        BLOCKS(IQ4_NL, decode_iq4_nl, 32, 18)
        BLOCKS(IQ4_XS, decode_iq4_xs, 256, 136)
        BLOCKS(MXFP4, decode_mxfp4, 32, 17)
        BLOCKS(F8_E4M3, decode_f8_e4m3, 128, 132)
    case SPLIT_BF16: decode_split_bf16(w, row, first, count, out); return;
    case HIGH_BF16: decode_high_bf16(w, row, first, count, out); return;
    case INT4: decode_int4(w, row, first, count, out); return;
    default: memcpy(out, w->data + row * w->stride + 4 * first, count * 4);
    }
#undef BLOCKS
}

typedef vf Sums[DECODED];

/* Adds `count` columns, a multiple of W, to the sums of `rows` rows and `outputs` outputs, which are
   0 so far if they are `fresh`. */
INLINE void add_columns(int rows, int outputs, const float *x, int64_t x_stride,
                        const float *const *weights, int64_t count, Sums *sums, int first,
                        int fresh) {
    vf acc[TOGETHER][DECODED];
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outputs; o++) acc[r][o] = fresh ? all(0) : sums[r][first + o];
    for (int64_t i = 0; i < count; i += W) {
        vf w[DECODED];
        for (int o = 0; o < outputs; o++) w[o] = load(weights[o] + i);
        for (int r = 0; r < rows; r++) {
            vf numbers = load(x + r * x_stride + i);
            for (int o = 0; o < outputs; o++) acc[r][o] = fma_of(numbers, w[o], acc[r][o]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outputs; o++) sums[r][first + o] = acc[r][o];
}

/* Prefetches bytes. Rows are stored one after the other, but read in segments, which hardware
   prefetchers do not follow. */
INLINE void prefetch(const uint8_t *at, int64_t nbytes) {
    for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

/* Stores up to OUTPUTS results of a row from output `first`. `rest` are the sums of columns that do
   not fill a vector. */
INLINE void finish(const Product *p, int64_t row, int64_t first, int count, const vf *sums,
                   const float *rest) {
    /* A load of more than the four numbers of a store cannot be forwarded from it, and stalls. */
    float total[OUTPUTS], *out = p->out + row * p->out_stride + first;
    four_sums(sums, total);
    for (int o = 0; o < OUTPUTS && o < count; o++) {
        float result = total[o] + rest[o];
        if (p->bias) result += p->bias[first + o];
        if (p->factor != 1) result *= p->factor;
        out[o] = p->adds ? out[o] + result : result;
    }
}

static void product(const Product *p, int64_t first, int64_t end) {
    const Weight *w = p->weight;
    _Alignas(64) float buffer[DECODED][LONGEST];
    Sums sums[MOST_ROWS];
    float rest[MOST_ROWS][DECODED];
    int64_t segment = w->columns <= LONGEST ? w->columns : SEGMENT;
    for (int64_t output = first; output < end; output += DECODED) {
        int outputs = end - output < DECODED ? (int)(end - output) : DECODED;
        memset(rest, 0, p->rows * sizeof *rest);
        if (!w->columns) memset(sums, 0, p->rows * sizeof *sums);
        for (int64_t column = 0; column < w->columns; column += segment) {
            int64_t left = w->columns - column, count = left < segment ? left : segment;
            int64_t whole = count / W * W, row = 0;
            int64_t begin = w->stride * column / w->columns, size = w->stride * count / w->columns;
            const float *weights[DECODED];
            for (int o = 0; o < DECODED; o++) {
                if (o >= outputs) {
                    /* An output that is not there repeats the first one. */
                    weights[o] = weights[0];
                    continue;
                }
                int64_t later = output + o + DECODED;
                prefetch(w->data + later * w->stride + begin, size);
                if (w->low) prefetch(w->low + later * (w->columns / 2) + column / 2, count / 2);
                if (w->format == F32) {
                    weights[o] = (const float *)(w->data + (output + o) * w->stride) + column;
                    continue;
                }
                weights[o] = buffer[o];
                decode(w, output + o, column, count, buffer[o]);
                if (p->rounded != F32) round_numbers(p->rounded, count, buffer[o]);
            }
            const float *x = p->x + column;
            for (; row + TOGETHER <= p->rows; row += TOGETHER)
                for (int o = 0; o < DECODED; o += OUTPUTS)
                    add_columns(TOGETHER, OUTPUTS, x + row * p->x_stride, p->x_stride, weights + o,
                                whole, sums + row, o, !column);
            for (; row < p->rows; row++)
                add_columns(1, DECODED, x + row * p->x_stride, p->x_stride, weights, whole,
                            sums + row, 0, !column);
            for (int64_t i = whole; i < count; i++)
                for (row = 0; row < p->rows; row++)
                    for (int o = 0; o < outputs; o++)
                        rest[row][o] += x[row * p->x_stride + i] * weights[o][i];
        }
        for (int64_t row = 0; row < p->rows; row++)
            for (int o = 0; o < outputs; o += OUTPUTS)
                finish(p, row, output + o, outputs - o, sums[row] + o, rest[row] + o);
    }
}
