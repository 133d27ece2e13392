/* Attention of a few queries to keys in blocks, merged as the blocks come (Flash-Decoding; Dao et
   al., 2023), in float32. A head's keys are divided into splits: each takes its own part of every
   block, so results do not depend on how many blocks come at once, nor on the threads. */
#pragma once

#include <math.h>

#include "blocks.h"
#include "host.h"
#include "product.h"

/* Keys of a tile are at most this many numbers, and at least 16 keys, the largest scored chunk. */
enum { TILE_NUMBERS = 1 << 13, TILE_KEYS = 64, LEAST_KEYS = 16, MOST_HEAD_DIM = 1024 };

/* exp(x) for x <= 0, as Cephes computes it; 0 where the result would be denormal, and NaN of NaN:
   `most` returns its second argument if they cannot be compared. */
INLINE vf exponential(vf x) {
    vi vanishes = (vi)(x < all(-87.33654f));
    x = most(all(-87.33654f), x);
    /* Adding and subtracting 1.5 * 2^23 rounds to the nearest integer. */
    vf turns = fma_of(x, all(1.44269504088896341f), all(12582912.0f)) - all(12582912.0f);
    vf rest = fma_of(turns, all(-0.693359375f), x);
    rest = fma_of(turns, all(2.12194440e-4f), rest);
    vf sum = all(1.9875691500e-4f);
    sum = fma_of(sum, rest, all(1.3981999507e-3f));
    sum = fma_of(sum, rest, all(8.3334519073e-3f));
    sum = fma_of(sum, rest, all(4.1665795894e-2f));
    sum = fma_of(sum, rest, all(1.6666665459e-1f));
    sum = fma_of(sum, rest, all(5.0000001201e-1f));
    sum = fma_of(sum, rest * rest, rest) + all(1);
    vi power = __builtin_convertvector(turns, vi) + 127;
    return (vf)(~vanishes & (vi)(sum * (vf)(power << 23)));
}

/* Rows of a tile as float32, each padded with zeros to `width` numbers. */
static void widen(const uint8_t *at, int64_t stride, int64_t format, int64_t count, int64_t dim,
                  int64_t width, float *out) {
    for (int64_t t = 0; t < count; t++, at += stride, out += width) {
        int64_t i = 0;
        if (format == F16) decode_f16(at, dim, out), i = dim;
        else if (format == BF16) decode_bf16(at, dim, out), i = dim;
        else if (format == F32) memcpy(out, at, dim * 4), i = dim;
        else {
            for (; i + W <= dim; i += W) store(out + i, floats(signed_bytes(at + i)));
            for (; i < dim; i++) out[i] = (int8_t)at[i];
        }
        for (; i < width; i++) out[i] = 0;
    }
}

/* Keys or values of a tile: `at` itself if they are float32 and need no padding. */
INLINE const float *tile_of(const uint8_t *at, int64_t stride, int64_t format, int64_t count,
                            int64_t dim, int64_t width, float *room, int64_t *step) {
    if (format == F32 && dim == width && stride % 4 == 0) {
        *step = stride / 4;
        return (const float *)at;
    }
    widen(at, stride, format, count, dim, width, room);
    *step = width;
    return room;
}

/* Scores of rows, a multiple of TOGETHER, with keys: out [rows, TILE_KEYS]. */
INLINE void scores_of(const float *query, int64_t rows, const float *keys, int64_t step,
                      int64_t count, int64_t width, float (*out)[TILE_KEYS]) {
    for (int64_t t = 0; t < count; t += OUTPUTS) {
        const float *four[OUTPUTS];
        for (int o = 0; o < OUTPUTS; o++) four[o] = keys + (t + o < count ? t + o : t) * step;
        for (int64_t r = 0; r < rows; r += TOGETHER) {
            Sums sums[TOGETHER];
            for (int i = 0; i < TOGETHER; i++)
                for (int o = 0; o < OUTPUTS; o++) sums[i][o] = all(0);
            add_columns(TOGETHER, OUTPUTS, query + r * width, width, four, width, sums, 0);
            for (int i = 0; i < TOGETHER; i++) four_sums(sums[i], out[r + i] + t);
        }
    }
}

/* acc [TOGETHER, width] = acc * shrink + weights [TOGETHER, TILE_KEYS] times values, for `vectors`
   vectors of a row. */
INLINE void add_values(int vectors, float *acc, int64_t width, const float *shrink,
                       float (*weights)[TILE_KEYS], const float *values, int64_t step,
                       int64_t count) {
    vf sums[TOGETHER][2];
    for (int r = 0; r < TOGETHER; r++)
        for (int i = 0; i < vectors; i++)
            sums[r][i] = load(acc + r * width + i * W) * all(shrink[r]);
    for (int64_t t = 0; t < count; t++)
        for (int i = 0; i < vectors; i++) {
            vf value = load(values + t * step + i * W);
            for (int r = 0; r < TOGETHER; r++)
                sums[r][i] = fma_of(all(weights[r][t]), value, sums[r][i]);
        }
    for (int r = 0; r < TOGETHER; r++)
        for (int i = 0; i < vectors; i++) store(acc + r * width + i * W, sums[r][i]);
}

/* Hides the keys of a tile that a row does not see. first: index of the tile's first key */
INLINE void hide(const Attention *a, int64_t row, int64_t first, int64_t count, float *scores) {
    int64_t before = a->tokens - a->own, token = row % a->own;
    if (first + count <= before && !(a->window && first - before <= token - a->window)) return;
    for (int64_t t = 0; t < count; t++) {
        int64_t key = first + t - before;
        int seen = key < 0 || (a->visible ? a->visible[token * a->own + key] : key <= token);
        if (a->window && key <= token - a->window) seen = 0;
        if (!seen) scores[t] = -INFINITY;
    }
}

/* Turns scores into weights, exp(score - peak), and updates the peak and the total of a row. Returns
   the factor of what was summed before. `scores` is padded with -inf to a multiple of W. */
INLINE float weigh(float *scores, int64_t count, float *peak, float *total) {
    vf highest = all(-INFINITY);
    vi undefined = all_int(0);
    for (int64_t t = 0; t < count; t += W) {
        vf some = load(scores + t);
        highest = most(highest, some);
        undefined |= (vi)(some != some);
    }
    float greatest = *peak;
    for (int i = 0; i < W; i++) {
        if (highest[i] > greatest) greatest = highest[i];
        /* NaN in a score reaches everything that the row gives. */
        if (undefined[i]) greatest = NAN;
    }
    if (greatest == -INFINITY) {
        for (int64_t t = 0; t < count; t += W) store(scores + t, all(0));
        return 1;
    }
    vf sum = all(0);
    for (int64_t t = 0; t < count; t += W) {
        vf weight = exponential(load(scores + t) - all(greatest));
        store(scores + t, weight);
        sum += weight;
    }
    float shrink = *peak == -INFINITY ? 0 : expf(*peak - greatest);
    *total = *total * shrink + sum_of(sum);
    *peak = greatest;
    return shrink;
}

/* Where the scores of a row's chunks go, from the chunk of key `first` of a block. */
INLINE float *chunks_of(const Attention *a, int64_t head, int64_t row, int64_t block,
                        int64_t first) {
    int64_t chunks = (a->tokens + a->chunk - 1) / a->chunk;
    int64_t at = a->first_chunk + block * chunks + first / a->chunk;
    return a->scores + head * a->scores_head + row * a->scores_row + at;
}

INLINE void store_sums(const Attention *a, const float *numbers, int64_t count, float *out) {
    for (int64_t t = 0; t < count; out++) {
        float sum = 0;
        for (int64_t i = 0; i < a->chunk && t < count; i++, t++) sum += numbers[t];
        *out = sum;
    }
}

INLINE void store_masses(const Attention *a, const float *weights, int64_t count, float peak,
                         float *out) {
    for (int64_t t = 0; t < count; out++) {
        float sum = 0;
        for (int64_t i = 0; i < a->chunk && t < count; i++, t++) sum += weights[t];
        *out = sum == 0 ? -INFINITY : logf(sum) + peak;
    }
}

/* A tile of keys for some rows of a head; `acc` is padded to `width`. */
static void attend_tile(const Attention *a, int64_t head, int64_t block, int64_t first_row,
                        int64_t rows, int64_t first, int64_t count, const float *query,
                        const float *keys, int64_t key_step, const float *values,
                        int64_t value_step, int64_t width, float *acc, float *peak, float *total) {
    float scores[MOST_QUERIES][TILE_KEYS], shrink[MOST_QUERIES];
    int64_t padded = (count + W - 1) / W * W;
    scores_of(query, (rows + TOGETHER - 1) / TOGETHER * TOGETHER, keys, key_step, count, width,
              scores);
    for (int64_t r = 0; r < rows; r++) {
        if (a->scores && !a->mass)
            store_sums(a, scores[r], count, chunks_of(a, head, first_row + r, block, first));
        if (a->own) hide(a, first_row + r, first, count, scores[r]);
        for (int64_t t = count; t < padded; t++) scores[r][t] = -INFINITY;
        shrink[r] = weigh(scores[r], padded, peak + r, total + r);
        if (a->scores && a->mass)
            store_masses(a, scores[r], count, peak[r],
                         chunks_of(a, head, first_row + r, block, first));
    }
    /* Rows that are not there are zeros, and stay so. */
    int64_t all_rows = (rows + TOGETHER - 1) / TOGETHER * TOGETHER;
    for (int64_t r = rows; r < all_rows; r++) {
        memset(scores[r], 0, sizeof *scores);
        shrink[r] = 0;
    }
    for (int64_t r = 0; r < all_rows; r += TOGETHER) {
        int64_t i = 0;
        for (; i + 2 * W <= width; i += 2 * W)
            add_values(2, acc + r * width + i, width, shrink + r, scores + r, values + i,
                       value_step, count);
        if (i < width)
            add_values(1, acc + r * width + i, width, shrink + r, scores + r, values + i,
                       value_step, count);
    }
}

/* Adds one split of all blocks to some rows of a head. */
static void attend_rows(const Attention *a, int64_t head, int64_t split, int64_t first_row,
                        int64_t rows) {
    _Alignas(64) float key_room[TILE_NUMBERS * 2], value_room[TILE_NUMBERS * 2];
    _Alignas(64) float query[MOST_QUERIES * MOST_HEAD_DIM], acc[MOST_QUERIES * MOST_HEAD_DIM];
    int64_t dim = a->head_dim, width = (dim + W - 1) / W * W;
    int64_t tile = TILE_NUMBERS / width / 16 * 16;
    tile = tile > TILE_KEYS ? TILE_KEYS : tile < LEAST_KEYS ? LEAST_KEYS : tile;
    int64_t place = (split * a->heads + head) * a->rows + first_row;
    float *peak = a->peak + place, *total = a->total + place, *state = a->acc + place * dim;
    size_t used = (rows + TOGETHER - 1) / TOGETHER * TOGETHER * width * sizeof(float);
    memset(query, 0, used);
    memset(acc, 0, used);
    for (int64_t r = 0; r < rows; r++) {
        const float *from = a->query + head * a->query_head + (first_row + r) * a->query_row;
        for (int64_t i = 0; i < dim; i++) query[r * width + i] = from[i] * a->scale;
        if (a->fresh) peak[r] = -INFINITY, total[r] = 0;
        else memcpy(acc + r * width, state + r * dim, dim * sizeof(float));
    }
    int64_t tiles = (a->tokens + tile - 1) / tile;
    int64_t begin = tiles * split / a->splits * tile, end = tiles * (split + 1) / a->splits * tile;
    if (end > a->tokens) end = a->tokens;
    for (int64_t block = 0; block < a->blocks; block++)
        for (int64_t first = begin; first < end; first += tile) {
            int64_t count = end - first < tile ? end - first : tile, key_step, value_step;
            const uint8_t *key = a->key + block * a->key_block + head * a->key_head;
            const uint8_t *value = a->value + block * a->value_block + head * a->value_head;
            const float *keys = tile_of(key + first * a->key_row, a->key_row, a->format, count,
                                        dim, width, key_room, &key_step);
            const float *values = tile_of(value + first * a->value_row, a->value_row, a->format,
                                          count, dim, width, value_room, &value_step);
            if (first + tile < end) {
                ask_for(key + (first + tile) * a->key_row, a->key_row * tile);
                ask_for(value + (first + tile) * a->value_row, a->value_row * tile);
            }
            attend_tile(a, head, block, first_row, rows, first, count, query, keys, key_step,
                        values, value_step, width, acc, peak, total);
        }
    for (int64_t r = 0; r < rows; r++)
        memcpy(state + r * dim, acc + r * width, dim * sizeof(float));
}

static void attend(const Attention *a, int64_t head, int64_t split) {
    for (int64_t row = 0; row < a->rows; row += MOST_QUERIES) {
        int64_t rows = a->rows - row < MOST_QUERIES ? a->rows - row : MOST_QUERIES;
        attend_rows(a, head, split, row, rows);
    }
}
