/* The gated delta rule (Gated DeltaNet; Yang et al., 2025) and the recurrence of Mamba-2 (Dao and
   Gu, 2024), row after row, in float32: each row has the same bits whether the rows before it are
   in the state, were left behind by earlier passes, or come with it. */
#pragma once

#include <math.h>

#include "host.h"
#include "vectors.h"

/* to = decay * from + key times update; both [key_dim, value_dim], and may be one. */
INLINE void advance(const Rule *r, const float *from, float *to, float decay, const float *key,
                    const float *update) {
    int64_t width = r->value_dim;
    for (int64_t i = 0; i < r->key_dim; i++)
        for (int64_t j = 0; j < width; j++)
            to[i * width + j] = decay * from[i * width + j] + key[i] * update[j];
}

/* Computes a row of a value head from the state before it, and the state after it. */
INLINE void compute_row(const Rule *r, int64_t head, int64_t row, const float *from, float *to) {
    int64_t width = r->value_dim, place = head * r->rows + row;
    int64_t at = (head / r->group * r->rows + row) * r->key_dim;
    const float *query = r->queries + at, *key = r->keys + at;
    const float *value = r->values + place * width;
    float decay = expf(r->decays[place]), rate = r->rates[place];
    float *out = r->out + place * width;
    float *update = r->updates + head * r->updates_head + row * width;
    if (r->corrects) {
        memset(update, 0, sizeof(float) * width);
        for (int64_t i = 0; i < r->key_dim; i++)
            for (int64_t j = 0; j < width; j++) update[j] += key[i] * from[i * width + j];
        for (int64_t j = 0; j < width; j++) update[j] = rate * (value[j] - decay * update[j]);
    } else {
        for (int64_t j = 0; j < width; j++) update[j] = rate * value[j];
    }
    advance(r, from, to, decay, key, update);
    memset(out, 0, sizeof(float) * width);
    for (int64_t i = 0; i < r->key_dim; i++)
        for (int64_t j = 0; j < width; j++) out[j] += query[i] * to[i * width + j];
}

/* The row that a row of a tree follows, or -1. */
INLINE int64_t row_before(const Rule *r, int64_t row) {
    int64_t before = row - 1;
    while (before >= 0 && !r->visible[row * r->rows + before]) before--;
    return before;
}

/* Computes all rows that descend from a row, whose state is the first of `states`. */
static void descend(const Rule *r, int64_t head, int64_t from, float *states) {
    float *next = states + r->key_dim * r->value_dim;
    for (int64_t row = from + 1; row < r->rows; row++)
        if (row_before(r, row) == from) {
            compute_row(r, head, row, states, next);
            descend(r, head, row, next);
        }
}

/* Computes all rows of a value head. states: room for a state for each row of the longest path, and
   one more */
static void delta(const Rule *r, int64_t head, float *states) {
    int64_t size = r->key_dim * r->value_dim;
    float *state = r->state + head * size;
    if (!r->advances) state = memcpy(states, state, sizeof(float) * size);
    const float *keys = r->past_keys + head / r->group * r->past_keys_head;
    const float *updates = r->past_updates + head * r->past_updates_head;
    const float *decays = r->past_decays + head * r->past_decays_head;
    for (int64_t row = 0; row < r->past; row++)
        advance(r, state, state, expf(decays[row]), keys + row * r->key_dim,
                updates + row * r->value_dim);
    if (r->visible) descend(r, head, -1, state);
    else
        for (int64_t row = 0; row < r->rows; row++) compute_row(r, head, row, state, state);
}
