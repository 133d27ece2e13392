/* Numbers as they are stored, decoded to float32: dense ones, GGUF's blocks and FP8. Every result is
   bit for bit that of `triforce_kernels.weights.blocks.reference_decode`: products and sums round
   one after the other.

   A function decodes `count` numbers, whole blocks, from an address. */
#pragma once

#include "host.h"
#include "vectors.h"

/* out = scale * number, for 16 signed bytes. */
INLINE void scaled(bytes16 numbers, vf scale, float *out) {
    for (int i = 0; i < 16 / W; i++) store(out + i * W, scale * floats(signed_part(numbers, i)));
}

/* out = scale * number + offset, for 16 unsigned bytes. */
INLINE void scaled_and_moved(bytes16 numbers, vf scale, vf offset, float *out) {
    for (int i = 0; i < 16 / W; i++)
        store(out + i * W, scale * floats(unsigned_part(numbers, i)) + offset);
}

/* What numbers of up to 4 bits stand for: scale * level + offset. With 16 lanes it is a vector from
   which one instruction chooses by the low 4 bits of an integer. */
#if defined(AVX512)
typedef vf Table;
INLINE Table table_of(const int8_t *levels, vf scale, vf offset) {
    return scale * floats(signed_bytes((const uint8_t *)levels)) + offset;
}
INLINE void put_chosen(Table table, bytes16 bytes, int shift, float *out) {
    __m512i index = (__m512i)(unsigned_part(bytes, 0) >> shift);
    store(out, (vf)_mm512_permutexvar_ps(index, (__m512)table));
}
#else
typedef struct {
    bytes16 levels;
    vf scale, offset;
} Table;
INLINE Table table_of(const int8_t *levels, vf scale, vf offset) {
    return (Table){load_bytes((const uint8_t *)levels), scale, offset};
}
INLINE void put_chosen(Table table, bytes16 bytes, int shift, float *out) {
    bytes16 levels = look_up(table.levels, bytes >> shift & 15);
    for (int i = 0; i < 16 / W; i++)
        store(out + i * W, table.scale * floats(signed_part(levels, i)) + table.offset);
}
#endif

static const int8_t COUNTED[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const int8_t CENTRED[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
/* Numbers of 2 and 3 bits, over and over. */
static const int8_t TWO_BITS[16] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
static const int8_t THREE_BITS[16] = {-4, -3, -2, -1, 0, 1, 2, 3, -4, -3, -2, -1, 0, 1, 2, 3};
static const int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
/* Twice the numbers of the format, which are multiplied by half of the scale. */
static const int8_t FP4_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* 32 numbers: those in the low 4 bits of 16 bytes, then those in the high 4 bits. */
INLINE void put_both(Table table, const uint8_t *at, float *out) {
    bytes16 both = load_bytes(at);
    put_chosen(table, both, 0, out);
    put_chosen(table, both, 4, out + 16);
}

/* 16 in each byte whose bit is set, for bits 0 to 15 or 16 to 31 of the 4 bytes at an address that 12
   others follow; 0 elsewhere. */
INLINE bytes16 fifth_bits(const uint8_t *at, int upper) {
    const uint64_t bits[2] = {UINT64_C(0x8040201008040201), UINT64_C(0x8040201008040201)};
    const bytes16 lower_bytes = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    bytes16 bit = load_bytes((const uint8_t *)bits);
    bytes16 each = look_up(load_bytes(at), upper ? lower_bytes + 2 : lower_bytes);
    return (bytes16)((each & bit) == bit) & 16;
}

static void decode_q4_0(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 32, at += 18, out += 32)
        put_both(table_of(CENTRED, all(half(at)), all(0)), at + 2, out);
}

static void decode_q4_1(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 32, at += 20, out += 32)
        put_both(table_of(COUNTED, all(half(at)), all(half(at + 2))), at + 4, out);
}

static void decode_q5_0(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 32, at += 22, out += 32) {
        bytes16 both = load_bytes(at + 6);
        vf d = all(half(at));
        scaled(((both & 15) | fifth_bits(at + 2, 0)) - 16, d, out);
        scaled((both >> 4 | fifth_bits(at + 2, 1)) - 16, d, out + 16);
    }
}

static void decode_q5_1(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 32, at += 24, out += 32) {
        bytes16 both = load_bytes(at + 8);
        vf d = all(half(at)), m = all(half(at + 2));
        scaled_and_moved((both & 15) | fifth_bits(at + 4, 0), d, m, out);
        scaled_and_moved(both >> 4 | fifth_bits(at + 4, 1), d, m, out + 16);
    }
}

static void decode_q8_0(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 32, at += 34, out += 32) {
        vf d = all(half(at));
        scaled(load_bytes(at + 2), d, out);
        scaled(load_bytes(at + 18), d, out + 16);
    }
}

INLINE uint32_t word(const uint8_t *at) {
    uint32_t four;
    memcpy(&four, at, 4);
    return four;
}

/* The 8 scales of Q4_K and Q5_K, then their 8 minima with the opposite sign. They are in 12 bytes of
   6-bit numbers, after two factors. */
INLINE void k_scales(const uint8_t *at, float *out) {
    typedef uint32_t words __attribute__((vector_size(16)));
    uint32_t first = word(at + 4), second = word(at + 8), third = word(at + 12);
    words all_six = {first & 0x3f3f3f3f, (third & 0x0f0f0f0f) | (first >> 2 & 0x30303030),
                     second & 0x3f3f3f3f, (third >> 4 & 0x0f0f0f0f) | (second >> 2 & 0x30303030)};
    scaled((bytes16)all_six, all(1), out);
    float d = half(at), dmin = -half(at + 2);
    for (int i = 0; i < 8; i++) {
        out[i] *= d;
        out[i + 8] *= dmin;
    }
}

static void decode_q4_k(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 256, at += 144) {
        float scales[16];
        k_scales(at, scales);
        for (int pair = 0; pair < 4; pair++, out += 64) {
            const float *scale = scales + 2 * pair;
            Table low = table_of(COUNTED, all(scale[0]), all(scale[8]));
            Table high = table_of(COUNTED, all(scale[1]), all(scale[9]));
            for (int i = 0; i < 32; i += 16) {
                bytes16 both = load_bytes(at + 16 + 32 * pair + i);
                put_chosen(low, both, 0, out + i);
                put_chosen(high, both, 4, out + 32 + i);
            }
        }
    }
}

static void decode_q5_k(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 256, at += 176) {
        float scales[16];
        k_scales(at, scales);
        bytes16 bits[2] = {load_bytes(at + 16), load_bytes(at + 32)};
        for (int pair = 0; pair < 4; pair++, out += 64) {
            vf low = all(scales[2 * pair]), high = all(scales[2 * pair + 1]);
            vf less = all(scales[8 + 2 * pair]), more = all(scales[9 + 2 * pair]);
            for (int i = 0; i < 2; i++) {
                bytes16 both = load_bytes(at + 48 + 32 * pair + 16 * i);
                scaled_and_moved((both & 15) | (bits[i] & 1) << 4, low, less, out + 16 * i);
                scaled_and_moved(both >> 4 | (bits[i] & 2) << 3, high, more, out + 32 + 16 * i);
                bits[i] >>= 2;
            }
        }
    }
}

static void decode_q6_k(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 256, at += 210) {
        float d = half(at + 208);
        float all_scales[16];
        scaled(load_bytes(at + 192), all(d), all_scales);
        for (int side = 0; side < 2; side++, out += 128)
            for (int i = 0; i < 2; i++) {
                const float *scales = all_scales + 8 * side + i;
                bytes16 first = load_bytes(at + 64 * side + 16 * i);
                bytes16 second = load_bytes(at + 64 * side + 32 + 16 * i);
                bytes16 high = load_bytes(at + 128 + 32 * side + 16 * i);
                float *to = out + 16 * i;
                scaled(((first & 15) | (high & 3) << 4) - 32, all(scales[0]), to);
                scaled(((second & 15) | (high & 12) << 2) - 32, all(scales[2]), to + 32);
                scaled((first >> 4 | (high & 48)) - 32, all(scales[4]), to + 64);
                scaled((second >> 4 | (high & 192) >> 2) - 32, all(scales[6]), to + 96);
            }
    }
}

static void decode_q2_k(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 256, at += 84) {
        float d = half(at + 80), dmin = half(at + 82);
        float scales[16], minima[16];
        bytes16 both = load_bytes(at);
        scaled(both & 15, all(d), scales);
        scaled(both >> 4, all(-dmin), minima);
        for (int side = 0; side < 2; side++, out += 128)
            for (int i = 0; i < 2; i++) {
                bytes16 four = load_bytes(at + 16 + 32 * side + 16 * i);
                const float *scale = scales + 8 * side + i, *minimum = minima + 8 * side + i;
                for (int turn = 0; turn < 4; turn++) {
                    vf d = all(scale[2 * turn]), m = all(minimum[2 * turn]);
                    put_chosen(table_of(TWO_BITS, d, m), four, 2 * turn, out + 32 * turn + 16 * i);
                }
            }
    }
}

static void decode_q3_k(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 256, at += 110) {
        float d = half(at + 108), scales[16];
        bytes16 masks[2] = {load_bytes(at), load_bytes(at + 16)};
        typedef uint32_t words __attribute__((vector_size(16)));
        uint32_t first = word(at + 96), second = word(at + 100), high = word(at + 104);
        words low = {first & 0x0f0f0f0f, second & 0x0f0f0f0f, first >> 4 & 0x0f0f0f0f,
                     second >> 4 & 0x0f0f0f0f};
        words top = {high << 4, high << 2, high, high >> 2};
        scaled((bytes16)(low | (top & 0x30303030)) - 32, all(d), scales);
        for (int side = 0; side < 2; side++, out += 128)
            for (int i = 0; i < 2; i++) {
                bytes16 four = load_bytes(at + 32 + 32 * side + 16 * i);
                for (int turn = 0; turn < 4; turn++, four >>= 2, masks[i] >>= 1) {
                    Table table = table_of(THREE_BITS, all(scales[8 * side + 2 * turn + i]), all(0));
                    bytes16 three = (four & 3) | (masks[i] & 1) << 2;
                    put_chosen(table, three, 0, out + 32 * turn + 16 * i);
                }
            }
    }
}

static void decode_iq4_nl(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 32, at += 18, out += 32)
        put_both(table_of(IQ4_LEVELS, all(half(at)), all(0)), at + 2, out);
}

static void decode_iq4_xs(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 256, at += 136) {
        float d = half(at);
        int high = at[2] | at[3] << 8;
        for (int part = 0; part < 8; part++, out += 32) {
            int scale = (at[4 + part / 2] >> (part % 2 * 4) & 15) | (high >> (2 * part) & 3) << 4;
            put_both(table_of(IQ4_LEVELS, all(d * (scale - 32)), all(0)), at + 8 + 16 * part, out);
        }
    }
}

static void decode_mxfp4(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 32, at += 17, out += 32) {
        uint32_t bits = at[0] < 2 ? UINT32_C(0x00200000) << at[0] : (uint32_t)(at[0] - 1) << 23;
        float scale;
        memcpy(&scale, &bits, 4);
        put_both(table_of(FP4_DOUBLED, all(scale), all(0)), at + 1, out);
    }
}

static void decode_f8_e4m3(const uint8_t *at, int64_t count, float *out) {
    for (; count > 0; count -= 128, at += 132, out += 128) {
        float scale;
        memcpy(&scale, at + 128, 4);
        for (int i = 0; i < 128; i += W) {
            vi byte = unsigned_bytes(at + i), magnitude = byte & 127;
            /* 2^120 moves the exponent, and makes denormal numbers normal. */
            vf exact = (vf)(magnitude << 20) * all(0x1p120f);
            vi bits = (vi)exact | ((magnitude == 127) & 0x7fc00000) | (byte & 128) << 24;
            store(out + i, (vf)bits * all(scale));
        }
    }
}

static void decode_f16(const uint8_t *at, int64_t count, float *out) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(out + i, from_f16(at + 2 * i));
    for (; i < count; i++) out[i] = half(at + 2 * i);
}

static void decode_bf16(const uint8_t *at, int64_t count, float *out) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(out + i, from_bf16(at + 2 * i));
    for (; i < count; i++) {
        uint32_t bits = (uint32_t)(at[2 * i] | at[2 * i + 1] << 8) << 16;
        memcpy(out + i, &bits, 4);
    }
}

/* Rounds numbers to bfloat16, to the nearest, ties to even. */
INLINE vf to_bf16(vf x) {
    vi bits = (vi)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) & ~0xffff;
    return choose((vi)(x == x), (vf)rounded, x);
}

/* Rounds numbers to float16, to the nearest, ties to even. */
INLINE vf to_f16(vf x) {
#if defined(AVX512)
    vf some = (vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
    return choose((vi)(x == x), some, x);
#elif defined(AVX2)
    vf some = (vf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
    return choose((vi)(x == x), some, x);
#else
    vi bits = (vi)x, sign = bits & (vi)all(-0.0f), magnitude = bits ^ sign;
    vf normal = (vf)((magnitude + 0xfff + (magnitude >> 13 & 1)) & ~0x1fff);
    /* The last bit of .75 is the least number of the format. */
    vf small = (vf)magnitude + all(0.75f) - all(0.75f);
    vf some = choose((vi)((vf)magnitude < all(0x1p-14f)), small, normal);
    some = choose((vi)(some >= all(65536)), all(__builtin_inff()), some);
    return choose((vi)(x == x), (vf)((vi)some | sign), x);
#endif
}

static void round_numbers(int64_t format, int64_t count, float *numbers) {
    int64_t whole = count / W * W;
    if (format == F16)
        for (int64_t i = 0; i < whole; i += W) store(numbers + i, to_f16(load(numbers + i)));
    else
        for (int64_t i = 0; i < whole; i += W) store(numbers + i, to_bf16(load(numbers + i)));
    if (whole < count) {
        float some[W] = {0};
        memcpy(some, numbers + whole, (count - whole) * sizeof(float));
        store(some, format == F16 ? to_f16(load(some)) : to_bf16(load(some)));
        memcpy(numbers + whole, some, (count - whole) * sizeof(float));
    }
}
