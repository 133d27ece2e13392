/* Split matrices, their high bits alone, and groups of integers, decoded to float32. See
   `triforce_kernels.weights.split_codes` for the codes. */
#pragma once

#include "blocks.h"
#include "host.h"
#include "vectors.h"

enum { SIGN = 0x80, CODE = 0x78, BELOW = 12, ROWS_OF_A_START = 32 };

/* Sign and magnitude of coded numbers as 16 bits. first, second: what is added to the magnitude on
   each line of the code */
INLINE vi coded(vi high, vi base, vi first, vi second) {
    vi code = high & 127;
    vi above = least_int((code << 4) - (8 << 4) + first, (code << 3) + (80 << 3) + second);
    vi bits = (above + base) & (vi)((high & CODE) != 0);
    return bits | (high & SIGN) << 8;
}

INLINE uint16_t coded_one(uint8_t high, int base, int first, int second) {
    int code = high & 127, one = (code << 4) - (8 << 4) + first;
    int other = (code << 3) + (80 << 3) + second, bits = (one < other ? one : other) + base;
    return (uint16_t)((high & CODE ? bits : 0) | (high & SIGN) << 8);
}

INLINE float from_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* The index of the first exception at `place` or after it, among those of a row's group. */
static int64_t exception_from(const Weight *w, int64_t row, int64_t place) {
    int64_t group = row / ROWS_OF_A_START, begin = 0, end = w->room;
    if (group + 1 < w->groups) {
        int64_t from = w->starts[group], to = w->starts[group + 1];
        if (0 <= from && from <= to && to <= w->room) begin = from, end = to;
    }
    while (begin < end) {
        int64_t middle = (begin + end) / 2;
        if (w->places[middle] < place) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

/* Writes the exceptions of some columns. A damaged list cannot make it write elsewhere. */
static void put_exceptions(const Weight *w, int64_t row, int64_t first, int64_t count, float *out) {
    int64_t place = (row + w->first) * w->columns + first;
    int64_t entry = exception_from(w, row + w->first, place);
    for (; entry < w->room && w->places[entry] < place + count; entry++)
        if (w->places[entry] >= place)
            out[w->places[entry] - place] = from_bits((uint32_t)w->patterns[entry] << 16);
}

static void decode_split_bf16(const Weight *w, int64_t row, int64_t first, int64_t count,
                              float *out) {
    int64_t width = w->columns / 2, i = 0;
    const uint8_t *high = w->data + row * w->stride + first, *low = w->low + row * width;
    int base = (w->base[row] - BELOW) * 128;
    while (i < count) {
        /* Numbers of the first half of a row have their low bits in the low 4 bits of a byte. */
        int64_t column = first + i, upper = column >= width;
        int64_t end = !upper && first + count > width ? width - first : count;
        const uint8_t *bits = low + column - upper * width - i;
        for (; i + W <= end; i += W) {
            vi more = upper ? unsigned_bytes(bits + i) >> 4 : unsigned_bytes(bits + i) & 15;
            vi number = coded(unsigned_bytes(high + i), all_int(base), all_int(0), all_int(0));
            store(out + i, (vf)((number | more) << 16));
        }
        for (; i < end; i++) {
            uint32_t more = upper ? bits[i] >> 4 : bits[i] & 15;
            out[i] = from_bits((coded_one(high[i], base, 0, 0) | more) << 16);
        }
    }
    put_exceptions(w, row, first, count, out);
}

/* A vector of high bits of a row with a base. */
INLINE void vector_high_bf16(const uint8_t *at, int base, int64_t c, Sink *to) {
    vi byte = unsigned_bytes(at);
    vi number = coded(byte, all_int((base - BELOW) * 128), all_int(8), all_int(4));
    put(to, c, (vf)((number & (vi)((byte & CODE) != 0)) << 16));
}

INLINE float high_bf16_one(const Weight *w, int64_t row, int64_t column) {
    int high = w->data[row * w->stride + column], base = (w->base[row] - BELOW) * 128;
    return high & CODE ? from_bits((uint32_t)coded_one(high, base, 8, 4) << 16) : 0;
}

INLINE float scale_of(const Weight *w, const uint8_t *numbers, int64_t at) {
    if (w->scale_format == F16) return half(numbers + 2 * at);
    if (w->scale_format == BF16)
        return from_bits((uint32_t)(numbers[2 * at] | numbers[2 * at + 1] << 8) << 16);
    return ((const float *)numbers)[at];
}

/* A group of 4-bit integers of a row. */
INLINE void group_int4(const Weight *w, int64_t row, int64_t group, const uint8_t *at, int64_t c,
                       Sink *to) {
    int64_t width = w->group / 2;
    vf scale = all(scale_of(w, w->scale, group * w->scale_stride + row));
    vf offset = all(scale_of(w, w->offset, group * w->scale_stride + row));
    for (int64_t i = 0; i < width; i += W)
        put(to, c + i, floats(unsigned_bytes(at + i) & 15) * scale + offset);
    for (int64_t i = 0; i < width; i += W)
        put(to, c + width + i, floats(unsigned_bytes(at + i) >> 4) * scale + offset);
}

/* A group of 64 3-bit integers of a row: quarters by their low 2 bits, then eighths by the third. */
INLINE void group_int3(const Weight *w, int64_t row, int64_t group, const uint8_t *at, int64_t c,
                       Sink *to) {
    vf scale = all(scale_of(w, w->scale, group * w->scale_stride + row));
    vf offset = all(scale_of(w, w->offset, group * w->scale_stride + row));
    Table table = table_of(COUNTED, scale, offset);
    uint64_t eight;
    memcpy(&eight, at + 16, 8);
    /* 64 bits are shifted at once: bits that cross into another byte are not used there. */
    quads low = (quads)load_bytes(at), third = {eight, eight >> 1};
    UNROLL(2) for (int half = 0; half < 2; half++) {
        /* The integers of two quarters, in 4 bits each. */
        quads both = (low & EACH_BYTE(3)) | (low & EACH_BYTE(12)) << 2 |
                     (third & EACH_BYTE(1)) << 2 | (third & EACH_BYTE(4)) << 4;
        put_chosen(to, c + 32 * half, table, (bytes16)both, 0);
        put_chosen(to, c + 32 * half + 16, table, (bytes16)both, 4);
        low >>= 4, third >>= 4;
    }
}
