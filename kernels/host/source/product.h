/* Products of up to MOST_ROWS rows with a weight in any format, summed in float32.

   Numbers are multiplied with few rows as they are decoded. For more rows, some columns of DECODED
   rows of the weight are decoded into a buffer that stays in the first cache, then multiplied by all
   rows. The order of a sum depends on the number of columns alone: lane l of the one accumulator of a
   row and an output takes columns l, l + W, ... So a row has the same bits whatever stands beside it,
   and whichever thread computes it. */
#pragma once

#include "blocks.h"
#include "grids.h"
#include "host.h"
#include "split.h"

/* Columns that are decoded at a time: all of a short row, else SEGMENT of them. */
enum { SEGMENT = 512, LONGEST = 640, OUTPUTS = 4, DECODED = 2 * OUTPUTS };
/* Rows of a tile of a buffered product, and most rows that are multiplied as numbers are decoded: as
   many as there are registers for. */
#if defined(AVX512) || defined(NEON)
enum { TOGETHER = 4 };
#define AT_ONCE 4
#else
enum { TOGETHER = 2 };
#define AT_ONCE (2 * HAS_UNITS)
#endif

/* Prefetches bytes. Rows are stored one after the other, but read in segments, which hardware
   prefetchers do not follow. */
INLINE void prefetch(const uint8_t *at, int64_t nbytes) {
    for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

/* The address of a block of a row. Prefetches the same block of the row that is `later`, if one is. */
INLINE const uint8_t *next_block(const Weight *w, int64_t row, int64_t block, int64_t nbytes,
                                 int64_t later) {
    const uint8_t *at = w->data + row * w->stride + block * nbytes;
    if (later) prefetch(at + later * w->stride, nbytes);
    return at;
}

/* The functions below decode a part of `rows` rows of a weight, from `row`, in the order of their columns:
   a multiple of 256 columns, or up to the last one, but for those that fill no vector. `rows` is a
   constant wherever they are inlined. */
#define ROWS_OF(NAME)                                                                          \
    INLINE void rows_##NAME(const Weight *w, int64_t row, int rows, int64_t first, int64_t count, \
                            Sink *to)
#define EACH_ROW UNROLL(4) for (int r = 0; r < rows; r++)
#define BLOCK(elements, nbytes) \
    next_block(w, row + r, (first + c) / (elements), nbytes, to->rows ? rows : 0)
#define BLOCKS(NAME, block, elements, nbytes)                                                  \
    ROWS_OF(NAME) {                                                                            \
        for (int64_t c = 0; c + (elements) <= count; c += (elements))                          \
            EACH_ROW block(BLOCK(elements, nbytes), c, to + r);                                \
    }
/* Blocks of 32 to 256 numbers, with scales for parts of `size` numbers. */
#define LONG_BLOCKS(NAME, scales_of, part_of, size, elements, nbytes)                          \
    ROWS_OF(NAME) {                                                                            \
        for (int64_t c = 0; c + (elements) <= count; c += (elements)) {                        \
            const uint8_t *at[OUTPUTS];                                                        \
            float scales[OUTPUTS][32];                                                         \
            EACH_ROW scales_of(at[r] = BLOCK(elements, nbytes), scales[r]);                    \
            UNROLL(8) for (int part = 0; part < (elements) / (size); part++)                   \
                EACH_ROW part_of(at[r], part, scales[r], c + (size) * part, to + r);           \
        }                                                                                      \
    }

BLOCKS(F32, vector_f32, W, 4 * W)
BLOCKS(F16, vector_f16, W, 2 * W)
BLOCKS(BF16, vector_bf16, W, 2 * W)
BLOCKS(Q4_0, block_q4_0, 32, 18)
BLOCKS(Q4_1, block_q4_1, 32, 20)
BLOCKS(Q5_0, block_q5_0, 32, 22)
BLOCKS(Q5_1, block_q5_1, 32, 24)
BLOCKS(Q8_0, block_q8_0, 32, 34)
LONG_BLOCKS(Q2_K, scales_q2_k, part_q2_k, 32, 256, 84)
LONG_BLOCKS(Q3_K, scales_q3_k, part_q3_k, 32, 256, 110)
LONG_BLOCKS(Q4_K, scales_k, part_q4_k, 64, 256, 144)
LONG_BLOCKS(Q5_K, scales_k, part_q5_k, 32, 256, 176)
LONG_BLOCKS(Q6_K, scales_q6_k, part_q6_k, 32, 256, 210)
BLOCKS(IQ4_NL, block_iq4_nl, 32, 18)
LONG_BLOCKS(IQ4_XS, scales_iq4_xs, part_iq4_xs, 32, 256, 136)
BLOCKS(MXFP4, block_mxfp4, 32, 17)
LONG_BLOCKS(F8_E4M3, scales_f8_e4m3, part_f8_e4m3, 32, 128, 132)
LONG_BLOCKS(F8_HIGH, scales_f8_high, part_f8_high, 32, 128, 84)
LONG_BLOCKS(Q5_K_HIGH, scales_k, part_q5_k_high, 64, 256, 144)
LONG_BLOCKS(Q6_K_HIGH, scales_q6_k_high, part_q6_k_high, 32, 256, 146)
BLOCKS(INT4_32, block_int4, 32, 20)
LONG_BLOCKS(INT4_64, scales_int4, part_int4, 64, 64, 36)
LONG_BLOCKS(INT4_128, scales_int4, part_int4, 64, 128, 68)
LONG_BLOCKS(INT8_32, scales_int4, part_int8, 32, 32, 36)
LONG_BLOCKS(INT8_64, scales_int4, part_int8, 32, 64, 68)
LONG_BLOCKS(INT8_128, scales_int4, part_int8, 32, 128, 132)
LONG_BLOCKS(NVFP4, scales_nvfp4, part_nvfp4, 64, 128, 76)
LONG_BLOCKS(IQ3_XXS, scales_iq3_xxs, part_iq3_xxs, 32, 256, 98)
LONG_BLOCKS(IQ3_S, scales_iq3_s, part_iq3_s, 32, 256, 110)
LONG_BLOCKS(IQ2_XXS, scales_iq2_xxs, part_iq2_xxs, 32, 256, 66)
LONG_BLOCKS(IQ2_XS, scales_iq2_xs, part_iq2_xs, 32, 256, 74)
LONG_BLOCKS(IQ2_S, scales_iq2_s, part_iq2_s, 32, 256, 82)
ROWS_OF(HIGH_BF16) {
    for (int64_t c = 0; c + W <= count; c += W)
        EACH_ROW vector_high_bf16(BLOCK(W, W), w->base[row + r], c, to + r);
}
ROWS_OF(INT4) {
    for (int64_t c = 0; c + w->group <= count; c += w->group)
        EACH_ROW group_int4(w, row + r, (first + c) / w->group, BLOCK(w->group, w->group / 2), c,
                            to + r);
}

ROWS_OF(INT3) {
    for (int64_t c = 0; c + 64 <= count; c += 64)
        EACH_ROW group_int3(w, row + r, (first + c) / 64, BLOCK(64, 24), c, to + r);
}

/* All formats but that of split matrices, whose exceptions come last. */
#define IN_ORDER(X)                                                                            \
    X(F32) X(F16) X(BF16) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) \
    X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(MXFP4) X(F8_E4M3) X(F8_HIGH) X(Q5_K_HIGH) \
    X(Q6_K_HIGH) X(INT4_32) X(INT4_64) X(INT4_128) \
    X(INT8_32) X(INT8_64) X(INT8_128) X(NVFP4) X(IQ3_XXS) \
    X(IQ3_S) X(IQ2_XXS) X(IQ2_XS) X(IQ2_S) X(HIGH_BF16) X(INT4) X(INT3)

/* Decodes a part of a row of a weight to memory: as above, or up to the last column. */
static void decode(const Weight *w, int64_t row, int64_t first, int64_t count, float *out) {
    if (w->format == SPLIT_BF16) {
        decode_split_bf16(w, row, first, count, out);
        return;
    }
    Sink to = {.out = out};
    switch (w->format) {
#define DECODE(NAME) \
    case NAME: rows_##NAME(w, row, 1, first, count, &to); break;
        IN_ORDER(DECODE)
#undef DECODE
    }
    int64_t size = w->format == F32 ? 4 : 2, c = count / W * W;
    if (w->format == HIGH_BF16)
        for (; c < count; c++) out[c] = high_bf16_one(w, row, first + c);
    else if (w->format == F32 || w->format == F16 || w->format == BF16)
        for (; c < count; c++)
            out[c] = dense_one(w->format, w->data + row * w->stride + (first + c) * size);
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

/* Computes outputs of up to AT_ONCE rows, OUTPUTS at a time, from `first` as long as none is beyond
   `end`: numbers are multiplied as they are decoded. Returns the output after the last one. Each format
   has functions of its own for each number of rows, so that a compiler knows what to keep in registers. */
#define OF_ROWS(ROWS, NAME)                                                                    \
    static NOINLINE int64_t product_of_##ROWS##_##NAME(const Product *p, int64_t first,        \
                                                       int64_t end) {                          \
        const float none[OUTPUTS] = {0};                                                       \
        for (; first + OUTPUTS <= end; first += OUTPUTS) {                                     \
            Sink to[OUTPUTS];                                                                  \
            UNROLL(4) for (int o = 0; o < OUTPUTS; o++) to[o] = sink_of(p, ROWS);              \
            rows_##NAME(p->weight, first, OUTPUTS, 0, p->weight->columns, to);                 \
            vf sums[4][OUTPUTS];                                                               \
            UNROLL(4) for (int o = 0; o < OUTPUTS; o++) {                                      \
                sums[0][o] = to[o].first, sums[1][o] = to[o].second;                           \
                sums[2][o] = to[o].third, sums[3][o] = to[o].fourth;                           \
            }                                                                                  \
            for (int r = 0; r < ROWS; r++) finish(p, r, first, OUTPUTS, sums[r], none);        \
        }                                                                                      \
        return first;                                                                          \
    }
INLINE Sink sink_of(const Product *p, int rows) {
    Sink to = {.rows = rows, .first = all(0), .second = all(0), .third = all(0), .fourth = all(0)};
    for (int r = 0; r < rows; r++) to.x[r] = p->x + r * p->x_stride;
    return to;
}
#if AT_ONCE == 4
#define OF_FEW(NAME) OF_ROWS(1, NAME) OF_ROWS(2, NAME) OF_ROWS(3, NAME) OF_ROWS(4, NAME)
#define FEW(NAME) product_of_1_##NAME, product_of_2_##NAME, product_of_3_##NAME, product_of_4_##NAME
#elif AT_ONCE == 2
#define OF_FEW(NAME) OF_ROWS(1, NAME) OF_ROWS(2, NAME)
#define FEW(NAME) product_of_1_##NAME, product_of_2_##NAME
#endif
#if AT_ONCE
IN_ORDER(OF_FEW)
#endif

/* Calls these functions if rows of the weight are whole vectors. Returns the first output that is left.
   Without vector units they would be much code for little. */
static int64_t multiply_at_once(const Product *p, int64_t first, int64_t end) {
#if AT_ONCE
    typedef int64_t Few(const Product *, int64_t, int64_t);
#define ENTRY(NAME) [NAME] = {FEW(NAME)},
    static Few *const few[][AT_ONCE] = {IN_ORDER(ENTRY)};
#undef ENTRY
    const Weight *w = p->weight;
    if (p->rows < 1 || p->rows > AT_ONCE || w->columns % W || w->format == SPLIT_BF16) return first;
    return few[w->format][p->rows - 1](p, first, end);
#else
    (void)p, (void)end;
    return first;
#endif
}

static void product(const Product *p, int64_t first, int64_t end) {
    const Weight *w = p->weight;
    first = multiply_at_once(p, first, end);
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
