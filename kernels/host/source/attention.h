/* Attention of queries to keys in blocks, merged as the blocks come (Flash-Decoding; Dao et al.,
   2023), in float32.

   The order of all sums follows from the places of keys in the text alone. Keys `t * tile` to
   `(t + 1) * tile` of the text are a tile, and tile t belongs to split t % splits, whatever the
   blocks are. Keys that a row does not see weigh exactly 0. The rows of a tree take their keys in the
   order of their path. So a row has the same bits alone, in a draft, in a tree and in a prefill, with
   any blocks and any number of threads. */
#pragma once

#include <math.h>

#include "blocks.h"
#include "functions.h"
#include "host.h"
#include "product.h"

/* Keys of a tile are at most this many numbers, and at least 16 keys, the largest scored chunk. */
enum { TILE_NUMBERS = 1 << 13, TILE_KEYS = 64, LEAST_KEYS = 16, MOST_HEAD_DIM = 1024 };
/* Vectors of a value that are added at a time. */
enum { MOST_VECTORS = 4 };
/* A row of a tile's scores; OUTPUTS keys are scored at a time, wherever the first one stands. */
enum { SCORES = TILE_KEYS + 16 };

/* Rows of a tile as float32, each padded with zeros to `width` numbers. */
static void widen(const uint8_t *at, int64_t stride, int64_t format, int64_t count, int64_t dim,
                  int64_t width, float *out) {
    for (int64_t t = 0; t < count; t++, at += stride, out += width) {
        int64_t i = 0;
        if (format != INT8) decode_dense(format, at, dim, out), i = dim;
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

/* How many of the drafted keys a row sees, its own not counted. */
INLINE int64_t depth_of(const Attention *a, int64_t row) {
    int64_t token = a->own ? row % a->own : 0, depth = -1;
    if (!a->visible) return token;
    for (int64_t i = 0; i < a->drafted; i++) depth += a->visible[token * a->drafted + i] != 0;
    return depth;
}

/* Hides the keys of a tile that a row does not see. first: index in its block of the first key */
INLINE void hide(const Attention *a, int64_t row, int64_t first, int64_t count, float *scores) {
    int64_t before = a->tokens - a->drafted, token = row % a->own;
    if (first + count <= before && !a->window) return;
    int64_t gone = a->window ? depth_of(a, row) - a->window : INT64_MIN;
    for (int64_t t = 0; t < count; t++) {
        int64_t key = first + t - before;
        int seen = key < 0 || (a->visible ? a->visible[token * a->drafted + key] : key <= token);
        if (!seen || key <= gone) scores[t] = -INFINITY;
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
    float greatest = greatest_of(highest);
    /* NaN in a score reaches everything that the row gives, in later tiles too. */
    if (!(greatest >= *peak)) greatest = *peak;
    if (any(undefined)) greatest = NAN;
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

INLINE void store_masses(const Attention *a, const float *weights, int64_t count, float peak,
                         float *out) {
    for (int64_t t = 0; t < count; out++) {
        float sum = 0;
        for (int64_t i = 0; i < a->chunk && t < count; i++, t++) sum += weights[t];
        *out = sum == 0 ? -INFINITY : logf(sum) + peak;
    }
}

/* Some rows of a head, a part of its keys, and their state: rows as float32, padded to `width`. */
typedef struct {
    const Attention *a;
    int64_t head, first_row, rows, width;
    float *query, *acc, *peak, *total;
} Queries;

/* A part of a tile: `count` keys of a block from index `first`. `place` keys of the tile are before
   them. later_key, later_value: where a thread's next tile is stored; NULL if it has none */
typedef struct {
    const float *keys, *values;
    int64_t key_step, value_step, block, first, place, count;
    const uint8_t *later_key, *later_value;
} Keys;

/* Scores of rows with keys. Prefetches the next tile between them: all at once would stall. */
INLINE void scores_of(const Queries *q, const Keys *k, float (*out)[SCORES]) {
    const Attention *a = q->a;
    for (int64_t t = 0; t < k->count; t += OUTPUTS) {
        const float *four[OUTPUTS];
        for (int o = 0; o < OUTPUTS; o++)
            four[o] = k->keys + (t + o < k->count ? t + o : t) * k->key_step;
        for (int64_t r = 0; r < q->rows; r += TOGETHER) {
            Sums sums[TOGETHER];
            const float *query = q->query + r * q->width;
            add_columns(TOGETHER, OUTPUTS, query, q->width, four, q->width, sums, 0, 1);
            for (int i = 0; i < TOGETHER; i++) four_sums(sums[i], out[r + i] + k->place + t);
        }
        if (!k->later_key) continue;
        prefetch(k->later_key + t * a->key_row, OUTPUTS * a->key_row);
        prefetch(k->later_value + t * a->value_row, OUTPUTS * a->value_row);
    }
}

/* Makes weights of the scores of rows with keys, and updates their peaks and totals. Stores scores of
   chunks, if they are asked for. */
INLINE void weigh_rows(const Queries *q, const Keys *k, float (*scores)[SCORES], float *shrink) {
    const Attention *a = q->a;
    int64_t end = k->place + k->count, padded = (end + W - 1) / W * W;
    scores_of(q, k, scores);
    for (int64_t r = 0; r < q->rows; r++) {
        float *own = scores[r] + k->place, *chunks = NULL;
        if (a->scores) chunks = chunks_of(a, q->head, q->first_row + r, k->block, k->first);
        if (a->own) hide(a, q->first_row + r, k->first, k->count, own);
        for (int64_t t = 0; t < k->place; t++) scores[r][t] = -INFINITY;
        for (int64_t t = end; t < padded; t++) scores[r][t] = -INFINITY;
        shrink[r] = weigh(scores[r], padded, q->peak + r, q->total + r);
        if (chunks) store_masses(a, own, k->count, q->peak[r], chunks);
    }
}

/* acc = acc * shrink + weights times values, of TOGETHER rows from row `row`, for `vectors` vectors of
   each from column `column`. */
INLINE void add_values(int vectors, const Queries *q, const Keys *k, int64_t row, int64_t column,
                       const float *shrink, float (*weights)[SCORES]) {
    float *acc = q->acc + row * q->width + column;
    const float *values = k->values + column;
    vf sums[TOGETHER][MOST_VECTORS];
    for (int r = 0; r < TOGETHER; r++)
        for (int i = 0; i < vectors; i++)
            sums[r][i] = load(acc + r * q->width + i * W) * all(shrink[row + r]);
    for (int64_t t = 0; t < k->count; t++)
        for (int i = 0; i < vectors; i++) {
            vf value = load(values + t * k->value_step + i * W);
            for (int r = 0; r < TOGETHER; r++)
                sums[r][i] = fma_of(all(weights[row + r][k->place + t]), value, sums[r][i]);
        }
    for (int r = 0; r < TOGETHER; r++)
        for (int i = 0; i < vectors; i++) store(acc + r * q->width + i * W, sums[r][i]);
}

/* Adds keys and values to the state of rows. */
static void attend_keys(const Queries *q, const Keys *k) {
    float scores[MOST_QUERIES][SCORES], shrink[MOST_QUERIES];
    int64_t width = q->width, all_rows = (q->rows + TOGETHER - 1) / TOGETHER * TOGETHER;
    weigh_rows(q, k, scores, shrink);
    /* Rows that are not there are zeros, and stay so. */
    for (int64_t r = q->rows; r < all_rows; r++) {
        memset(scores[r], 0, sizeof *scores);
        shrink[r] = 0;
    }
    for (int64_t r = 0; r < all_rows; r += TOGETHER) {
        int64_t i = 0;
        for (; i + MOST_VECTORS * W <= width; i += MOST_VECTORS * W)
            add_values(MOST_VECTORS, q, k, r, i, shrink, scores);
        for (; i < width; i += W) add_values(1, q, k, r, i, shrink, scores);
    }
}

/* Keys and values of head `head`, from key `first` of a block, as they are stored. */
INLINE const uint8_t *key_at(const Attention *a, int64_t block, int64_t head, int64_t first) {
    return a->key + block * a->key_block + head * a->key_head + first * a->key_row;
}
INLINE const uint8_t *value_at(const Attention *a, int64_t block, int64_t head, int64_t first) {
    return a->value + block * a->value_block + head * a->value_head + first * a->value_row;
}

/* A part of a tile in which each row of a tree has keys of its own: those up to the tree, then those
   of its path. The keys are the only block. */
static void attend_paths(const Queries *q, Keys part, float *key_room, float *value_room) {
    const Attention *a = q->a;
    int64_t before = a->tokens - a->drafted, dim = a->head_dim, width = q->width;
    if (a->scores) {
        /* Chunks are scored where the rows lie; the state stays as it is. */
        float scores[MOST_QUERIES][SCORES], shrink[MOST_QUERIES];
        float peak[MOST_QUERIES], total[MOST_QUERIES];
        memcpy(peak, q->peak, sizeof(float) * q->rows);
        memcpy(total, q->total, sizeof(float) * q->rows);
        Queries scored = *q;
        scored.peak = peak, scored.total = total;
        part.keys = tile_of(key_at(a, 0, q->head, part.first), a->key_row, a->format, part.count,
                            dim, width, key_room, &part.key_step);
        weigh_rows(&scored, &part, scores, shrink);
    }
    /* A row alone sees all that it is given. */
    Attention alone = *a;
    alone.own = 0, alone.scores = NULL;
    _Alignas(64) float query[TOGETHER * MOST_HEAD_DIM], acc[TOGETHER * MOST_HEAD_DIM];
    memset(query, 0, sizeof(float) * TOGETHER * width);
    memset(acc, 0, sizeof(float) * TOGETHER * width);
    for (int64_t r = 0; r < q->rows; r++) {
        const uint8_t *seen = a->visible + (q->first_row + r) % a->own * a->drafted;
        int64_t depth = depth_of(a, q->first_row + r), own = 0, index = before, skipped = 0;
        int64_t gone = a->window ? before + depth - a->window : -1;
        Keys k = {key_room, value_room, width, width, 0, part.first, part.place, 0, NULL, NULL};
        for (int64_t t = part.first; t < part.first + part.count && t <= before + depth; t++) {
            int64_t from = t;
            for (; t >= before && index <= t; index++, own++) {
                while (!seen[own]) own++;
                from = before + own;
            }
            if (t <= gone) {
                skipped++;
                continue;
            }
            widen(key_at(a, 0, q->head, from), 0, a->format, 1, dim, width,
                  key_room + k.count * width);
            widen(value_at(a, 0, q->head, from), 0, a->format, 1, dim, width,
                  value_room + k.count++ * width);
        }
        if (!k.count) continue;
        k.place += skipped;
        memcpy(query, q->query + r * width, sizeof(float) * width);
        memcpy(acc, q->acc + r * width, sizeof(float) * width);
        Queries one = {&alone, q->head, 0, 1, width, query, acc, q->peak + r, q->total + r};
        attend_keys(&one, &k);
        memcpy(q->acc + r * width, acc, sizeof(float) * width);
    }
}

/* Whether no row sees any of `count` keys from key `first` of a block. */
INLINE int hidden(const Queries *q, int64_t first, int64_t count) {
    const Attention *a = q->a;
    if (!a->own || a->visible || a->scores) return 0;
    int64_t before = a->tokens - a->own, least = a->own, most = 0;
    for (int64_t r = q->first_row; r < q->first_row + q->rows; r++) {
        int64_t token = r % a->own;
        if (token < least) least = token;
        if (token > most) most = token;
    }
    return first - before > most || (a->window && first + count - before <= least - a->window + 1);
}

/* Adds the tiles of one split of a block to the state of rows. */
static void attend_block(const Queries *q, int64_t block, int64_t split, int64_t tile) {
    _Alignas(64) float key_room[TILE_NUMBERS * 2], value_room[TILE_NUMBERS * 2];
    const Attention *a = q->a;
    int64_t start = a->first_key + block * a->tokens, stop = start + a->tokens;
    int64_t shared = a->visible ? stop - a->drafted : stop, index = start / tile;
    index += ((split - index) % a->splits + a->splits) % a->splits;
    for (; index * tile < stop; index += a->splits) {
        int64_t from = index * tile, to = from + tile < stop ? from + tile : stop;
        int64_t place = from < start ? start - from : 0;
        Keys k = {NULL, NULL, 0, 0, block, from + place - start, place, to - from - place, NULL, NULL};
        if (hidden(q, k.first, k.count)) continue;
        if (to > shared) {
            attend_paths(q, k, key_room, value_room);
            continue;
        }
        const uint8_t *key = key_at(a, block, q->head, k.first);
        const uint8_t *value = value_at(a, block, q->head, k.first);
        k.keys = tile_of(key, a->key_row, a->format, k.count, a->head_dim, q->width, key_room,
                         &k.key_step);
        k.values = tile_of(value, a->value_row, a->format, k.count, a->head_dim, q->width,
                           value_room, &k.value_step);
        if (to + tile * (a->splits - 1) < stop) {
            k.later_key = key + tile * a->splits * a->key_row;
            k.later_value = value + tile * a->splits * a->value_row;
        }
        attend_keys(q, &k);
    }
}

/* The state of some rows of a head in one split: acc [rows, head_dim], peak and total [rows]. */
typedef struct {
    float *acc, *peak, *total;
} State;

/* Adds one split of all blocks to some rows of a head. */
static void attend_rows(const Attention *a, int64_t head, int64_t split, int64_t first_row,
                        int64_t rows, State state) {
    _Alignas(64) float query[MOST_QUERIES * MOST_HEAD_DIM], acc[MOST_QUERIES * MOST_HEAD_DIM];
    int64_t dim = a->head_dim, width = (dim + W - 1) / W * W;
    int64_t tile = TILE_NUMBERS / width / 16 * 16;
    tile = tile > TILE_KEYS ? TILE_KEYS : tile < LEAST_KEYS ? LEAST_KEYS : tile;
    Queries q = {a, head, first_row, rows, width, query, acc, state.peak, state.total};
    size_t used = (rows + TOGETHER - 1) / TOGETHER * TOGETHER * width * sizeof(float);
    memset(query, 0, used);
    memset(acc, 0, used);
    for (int64_t r = 0; r < rows; r++) {
        const float *from = a->query + head * a->query_head + (first_row + r) * a->query_row;
        for (int64_t i = 0; i < dim; i++) query[r * width + i] = from[i] * a->scale;
        if (a->fresh) q.peak[r] = -INFINITY, q.total[r] = 0;
        else memcpy(acc + r * width, state.acc + r * dim, dim * sizeof(float));
    }
    for (int64_t block = 0; block < a->blocks; block++) attend_block(&q, block, split, tile);
    for (int64_t r = 0; r < rows; r++)
        memcpy(state.acc + r * dim, acc + r * width, dim * sizeof(float));
}

static void attend(const Attention *a, int64_t head, int64_t split) {
    for (int64_t row = 0; row < a->rows; row += MOST_QUERIES) {
        int64_t rows = a->rows - row < MOST_QUERIES ? a->rows - row : MOST_QUERIES;
        int64_t place = (split * a->heads + head) * a->rows + row;
        State state = {a->acc + place * a->head_dim, a->peak + place, a->total + place};
        attend_rows(a, head, split, row, rows, state);
    }
}

/* Merges the splits of a row, whose states are `stride` rows apart: out [head_dim]. Returns its
   log-sum-exp. A row that saw no key gets 0 and -inf. */
static float merge_row(State state, int64_t splits, int64_t stride, int64_t dim, float *out) {
    float peak = -INFINITY, total = 0;
    for (int64_t s = 0; s < splits; s++)
        if (state.peak[s * stride] > peak) peak = state.peak[s * stride];
    for (int64_t i = 0; i < dim; i++) out[i] = 0;
    for (int64_t s = 0; s < splits; s++) {
        int64_t at = s * stride;
        if (state.peak[at] == -INFINITY) continue;
        float share = expf(state.peak[at] - peak);
        total += state.total[at] * share;
        for (int64_t i = 0; i < dim; i++) out[i] += state.acc[at * dim + i] * share;
    }
    for (int64_t i = 0; total != 0 && i < dim; i++) out[i] /= total;
    return total != 0 ? logf(total) + peak : -INFINITY;
}

static void merge(const Merge *m, int64_t first, int64_t end) {
    const Attention *a = m->attention;
    int64_t dim = a->head_dim, heads_of_head = a->rows / m->tokens;
    for (int64_t i = first; i < end; i++) {
        int64_t head = i / a->rows, row = i % a->rows;
        float *out = m->out + (head * heads_of_head + row / m->tokens) * m->out_head;
        State state = {a->acc + i * dim, a->peak + i, a->total + i};
        float lse = merge_row(state, a->splits, a->heads * a->rows, dim,
                              out + row % m->tokens * m->out_token);
        if (m->lse) m->lse[i] = lse;
    }
}

/* The whole attention of MOST_QUERIES rows of a head from row `first_row`, with states of its own:
   out [heads, rows, head_dim] and lse [heads, rows] of the whole call. */
static void attend_whole(const Attention *a, int64_t head, int64_t first_row, float *out,
                         float *lse) {
    int64_t left = a->rows - first_row, rows = left < MOST_QUERIES ? left : MOST_QUERIES;
    int64_t all = a->splits * rows, dim = a->head_dim, place = head * a->rows + first_row;
    float acc[all * dim], peak[all], total[all];
    for (int64_t s = 0; s < a->splits; s++) {
        State own = {acc + s * rows * dim, peak + s * rows, total + s * rows};
        attend_rows(a, head, s, first_row, rows, own);
    }
    for (int64_t r = 0; r < rows; r++) {
        State one = {acc + r * dim, peak + r, total + r};
        lse[place + r] = merge_row(one, a->splits, rows, dim, out + (place + r) * dim);
    }
}
