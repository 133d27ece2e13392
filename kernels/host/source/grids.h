/* IQ2 and IQ3, decoded like the blocks of `blocks.h`: an index stands for 8 or 4 numbers of a table, which
   are at most 62. Their signs are bits. */
#pragma once

#include "blocks.h"

/* 32 numbers with one scale, from 8 indices of a table of words. */
INLINE void put_threes(Sink *to, int64_t c, const uint32_t *grid, const uint32_t *index,
                       uint32_t signs, float scale) {
    for (int i = 0; i < 2; i++) {
        const uint32_t *at = index + 4 * i;
        words four = {grid[at[0]], grid[at[1]], grid[at[2]], grid[at[3]]};
        put_scaled(to, c + 16 * i, with_signs((bytes16)four, signs, i), all(scale));
    }
}

/* 32 numbers with a scale for each 16, from 4 indices of a table of pairs of words. */
INLINE void put_twos(Sink *to, int64_t c, const uint32_t *grid, const uint32_t *index,
                     uint32_t signs, const float *scales) {
    for (int i = 0; i < 2; i++) {
        const uint32_t *one = grid + 2 * index[2 * i], *two = grid + 2 * index[2 * i + 1];
        words four = {one[0], one[1], two[0], two[1]};
        put_scaled(to, c + 16 * i, with_signs((bytes16)four, signs, i), all(scales[i]));
    }
}

/* Signs of 8 numbers from 7 bits: the number of bits becomes even. */
INLINE uint32_t with_parity(uint32_t seven) {
    return seven | (uint32_t)__builtin_parity(seven) << 7;
}

/* Signs of 32 numbers from 4 times 7 bits. */
INLINE uint32_t four_signs(uint32_t bits) {
    return with_parity(bits & 127) | with_parity(bits >> 7 & 127) << 8 |
           with_parity(bits >> 14 & 127) << 16 | with_parity(bits >> 21 & 127) << 24;
}

INLINE void scales_iq3_xxs(const uint8_t *at, float *out) {
    float d = half(at);
    for (int i = 0; i < 8; i++) out[i] = d * (0.5f + (float)(word(at + 66 + 4 * i) >> 28)) * 0.5f;
}

INLINE void part_iq3_xxs(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    uint32_t index[8];
    for (int i = 0; i < 8; i++) index[i] = at[2 + 8 * part + i];
    put_threes(to, c, grid_iq3_xxs, index, four_signs(word(at + 66 + 4 * part)), scales[part]);
}

INLINE void scales_iq3_s(const uint8_t *at, float *out) {
    float d = half(at);
    for (int i = 0; i < 8; i++) out[i] = d * (float)(1 + 2 * (at[106 + i / 2] >> i % 2 * 4 & 15));
}

INLINE void part_iq3_s(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    uint32_t index[8], upper = at[66 + part];
    for (int i = 0; i < 8; i++) index[i] = at[2 + 8 * part + i] | (upper >> i & 1) << 8;
    put_threes(to, c, grid_iq3_s, index, word(at + 74 + 4 * part), scales[part]);
}

/* A scale for each 16 of 256 numbers, from 4 bits. */
INLINE float scale_of_two(float d, uint32_t four) { return d * (0.5f + (float)four) * 0.25f; }

INLINE void scales_iq2_xxs(const uint8_t *at, float *out) {
    float d = half(at);
    for (int i = 0; i < 16; i++) out[i] = scale_of_two(d, word(at + 6 + i / 2 * 8) >> 28);
}

INLINE void part_iq2_xxs(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    uint32_t index[4], signs = four_signs(word(at + 6 + 8 * part));
    for (int i = 0; i < 4; i++) index[i] = at[2 + 8 * part + i];
    put_twos(to, c, grid_iq2_xxs, index, signs, scales + 2 * part);
}

INLINE void scales_iq2_xs(const uint8_t *at, float *out) {
    float d = half(at);
    for (int i = 0; i < 16; i++) out[i] = scale_of_two(d, at[66 + i / 2] >> i % 2 * 4 & 15);
}

INLINE void part_iq2_xs(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    uint32_t index[4], signs = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t both = word(at + 2 + 8 * part + i / 2 * 4) >> i % 2 * 16 & 65535;
        index[i] = both & 511;
        signs |= with_parity(both >> 9) << 8 * i;
    }
    put_twos(to, c, grid_iq2_xs, index, signs, scales + 2 * part);
}

INLINE void scales_iq2_s(const uint8_t *at, float *out) {
    float d = half(at);
    for (int i = 0; i < 16; i++) out[i] = scale_of_two(d, at[74 + i / 2] >> i % 2 * 4 & 15);
}

INLINE void part_iq2_s(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    uint32_t index[4], upper = at[66 + part];
    for (int i = 0; i < 4; i++) index[i] = at[2 + 4 * part + i] | (upper >> 2 * i & 3) << 8;
    put_twos(to, c, grid_iq2_s, index, word(at + 34 + 4 * part), scales + 2 * part);
}
