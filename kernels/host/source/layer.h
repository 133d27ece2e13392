/* The small operations of a layer, row by row, in float32, rounded where the references round. Each
   number is computed by the same instructions wherever it stands, so a row has the same bits
   whatever stands beside it. */
#pragma once

#include "blocks.h"
#include "functions.h"
#include "host.h"

typedef uint16_t halves_of_vector __attribute__((vector_size(2 * W)));

INLINE int64_t size_of(int64_t format) { return format == F32 ? 4 : 2; }

/* `count` numbers of a format, at most W; the others are 0. */
INLINE vf read_numbers(int64_t format, const uint8_t *at, int64_t count) {
    uint8_t room[4 * W] = {0};
    if (count < W) at = memcpy(room, at, count * size_of(format));
    return format == F32 ? load((const float *)at) : format == F16 ? from_f16(at) : from_bf16(at);
}

INLINE vf rounded_to(int64_t format, vf x) {
    return format == F32 ? x : format == F16 ? to_f16(x) : to_bf16(x);
}

/* The bits of numbers that are rounded to half precision. */
INLINE vi half_bits(vf x) {
    vi sign = (vi)x & (vi)all(-0.0f), magnitude = (vi)x ^ sign;
    vf size = (vf)magnitude;
    vi small = (vi)(size < all(0x1p-14f));
    vi tiny = __builtin_convertvector((vf)(small & (vi)(size * all(0x1p24f))), vi);
    vi bits = (small & tiny) | (~small & ((magnitude - 0x38000000) >> 13));
    vi large = (vi)(size >= all(65536)), undefined = (vi)(x != x);
    bits = (large & 0x7c00) | (~large & bits);
    return (undefined & 0x7e00) | (~undefined & bits) | (sign >> 16 & 0x8000);
}

/* Writes `count` numbers, which are rounded to the format already. */
INLINE void write_numbers(int64_t format, uint8_t *at, vf x, int64_t count) {
    uint8_t room[4 * W];
    if (format == F32) store((float *)room, x);
    else {
        vi bits = format == F16 ? half_bits(x) : (vi)x >> 16;
        halves_of_vector narrow = __builtin_convertvector(bits, halves_of_vector);
        memcpy(room, &narrow, sizeof narrow);
    }
    if (count >= W) memcpy(at, room, W * size_of(format));
    else memcpy(at, room, count * size_of(format));
}

/* Runs a loop over the vectors of a row, with `n` numbers in each. */
#define EACH_VECTOR(width)                                                           \
    for (int64_t i = 0, n; n = (width) - i < W ? (width) - i : W, i < (width); i += W)

/* A norm of one row. `format` is a constant wherever this is inlined. */
INLINE void norm_row(const Norm *p, int64_t format, int64_t row, int64_t head) {
    int64_t size = size_of(format), width = p->width;
    uint8_t *x = p->x + (row * p->x_row + head * p->x_head) * size;
    uint8_t *out = p->out + (row * p->out_row + head * p->out_head) * size_of(p->out_format);
    const uint8_t *delta = p->delta ? p->delta + (row * p->heads + head) * width * size : NULL;
    const uint8_t *weight = p->weight ? p->weight + head * p->weight_head * size : NULL;
    vf squares = all(0), sums = all(0);
    EACH_VECTOR(width) {
        vf some = read_numbers(format, x + i * size, n);
        if (delta) {
            some = rounded_to(format, some + read_numbers(format, delta + i * size, n));
            write_numbers(format, x + i * size, some, n);
        }
        sums += some;
        squares = fma_of(some, some, squares);
    }
    float mean = 0, scale = p->factor;
    if (p->kind == NORM_LAYER) {
        mean = sum_of(sums) / width;
        squares = all(0);
        EACH_VECTOR(width) {
            float room[W] = {0};
            store(room, read_numbers(format, x + i * size, n) - all(mean));
            for (int64_t t = n; t < W; t++) room[t] = 0;
            squares = fma_of(load(room), load(room), squares);
        }
    }
    if (p->kind == NORM_UNIT) scale /= sqrtf(sum_of(squares) + p->eps);
    else scale /= sqrtf(sum_of(squares) / width + p->eps);
    EACH_VECTOR(width) {
        vf some = (read_numbers(format, x + i * size, n) - all(mean)) * all(scale);
        if (p->kind == NORM_RMS) some = rounded_to(format, some);
        if (weight)
            some *= read_numbers(format, weight + i * size, n) + all(p->offset);
        some = rounded_to(p->out_format, some);
        uint8_t *at = out + i * size_of(p->out_format);
        if (p->adds)
            some = rounded_to(p->out_format, some + read_numbers(p->out_format, at, n));
        write_numbers(p->out_format, at, some, n);
    }
}

static void norm(const Norm *p, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
        int64_t row = i / p->heads, head = i % p->heads;
        if (p->format == F32) norm_row(p, F32, row, head);
        else if (p->format == F16) norm_row(p, F16, row, head);
        else norm_row(p, BF16, row, head);
    }
}

static void map(int64_t operation, const float *x, float *out, int64_t count) {
    EACH_VECTOR(count) {
        vf some = mapped(operation, read_numbers(F32, (const uint8_t *)(x + i), n));
        write_numbers(F32, (uint8_t *)(out + i), some, n);
    }
}

/* The gated activation of a row. */
INLINE void gate_row(const Gate *p, int64_t format, int64_t row) {
    int64_t size = size_of(format), width = p->width;
    const uint8_t *gates = p->x + row * p->x_row * size, *ups = gates + width * size;
    EACH_VECTOR(width) {
        vf gate = read_numbers(format, gates + i * size, n);
        vf up = read_numbers(format, ups + i * size, n), some;
        if (p->operation == GATE_CLAMPED) {
            gate = choose((vi)(gate > all(7)), all(7), gate);
            up = choose((vi)(up > all(7)), all(7), choose((vi)(up < all(-7)), all(-7), up));
            up = rounded_to(format, rounded_to(format, up + all(1)) * gate);
            some = rounded_to(format, sigmoid_of(rounded_to(format, gate * all(1.702f))));
        } else some = rounded_to(format, mapped(p->operation, gate));
        write_numbers(format, p->out + (row * width + i) * size, rounded_to(format, some * up), n);
    }
}

static void gated(const Gate *p, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
        if (p->format == F32) gate_row(p, F32, row);
        else if (p->format == F16) gate_row(p, F16, row);
        else gate_row(p, BF16, row);
    }
}

/* Rotates a head of a token, or copies it if `turns` is 0. */
INLINE void rotate_head(const Rope *p, int64_t format, int64_t token, const uint8_t *x,
                        uint8_t *out, int turns) {
    int64_t size = size_of(format), half = p->head_dim / 2;
    if (!turns) {
        memcpy(out, x, p->head_dim * size);
        return;
    }
    const uint8_t *cos = p->cos + token * p->head_dim * size;
    const uint8_t *sin = p->sin + token * p->head_dim * size;
    for (int part = 0; part < 2; part++) {
        int64_t at = part * half * size, other = half * size - at;
        EACH_VECTOR(half) {
            vf own = read_numbers(format, x + at + i * size, n);
            vf turned = read_numbers(format, x + other + i * size, n);
            if (!part) turned = -turned;
            vf some = rounded_to(format, own * read_numbers(format, cos + at + i * size, n));
            some += rounded_to(format, turned * read_numbers(format, sin + at + i * size, n));
            write_numbers(format, out + at + i * size, rounded_to(format, some), n);
        }
    }
}

INLINE void rope_token(const Rope *p, int64_t format, int64_t token) {
    int64_t size = size_of(format);
    for (int64_t head = 0; head < p->heads; head++) {
        const uint8_t *x = p->x + (token * p->x_row + head * p->x_head) * size;
        int64_t kv = head - p->queries, place = p->start + token;
        if (kv < 0)
            rotate_head(p, format, token, x, p->out + (head * p->tokens + token) * p->head_dim * size,
                        1);
        else if (kv < p->kv_heads)
            rotate_head(p, format, token, x, p->key + (kv * p->key_head + place * p->key_row) * size, 1);
        else {
            kv -= p->kv_heads;
            rotate_head(p, format, token, x,
                        p->value + (kv * p->value_head + place * p->value_row) * size, 0);
        }
    }
}

static void rope(const Rope *p, int64_t first, int64_t end) {
    for (int64_t token = first; token < end; token++) {
        if (p->format == F32) rope_token(p, F32, token);
        else if (p->format == F16) rope_token(p, F16, token);
        else rope_token(p, BF16, token);
    }
}
