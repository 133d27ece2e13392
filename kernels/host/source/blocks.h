/* Numbers as they are stored, decoded to float32: dense ones, GGUF's blocks and FP8. Every result is
   bit for bit that of `triforce_kernels.weights.blocks.reference_decode`: products and sums round
   one after the other.

   A function decodes one block, whose numbers are columns from `c`, in their order. Of long blocks it
   decodes a part, with the scales of the whole block. */
#pragma once

#include "host.h"
#include "vectors.h"

typedef uint32_t words __attribute__((vector_size(16)));

/* What becomes of the decoded numbers of a row of a weight: they are stored in `out`, or their products
   with the numbers of x are added to the sums of up to four rows of x. The number of rows is a constant
   wherever this is inlined, and 0 if numbers are stored. */
typedef struct {
    int rows;
    float *out;
    const float *x[4];
    vf first, second, third, fourth;
} Sink;

/* W numbers from column `i`. */
INLINE void put(Sink *to, int64_t i, vf numbers) {
    if (!to->rows) store(to->out + i, numbers);
    if (to->rows > 0) to->first = fma_of(load(to->x[0] + i), numbers, to->first);
    if (to->rows > 1) to->second = fma_of(load(to->x[1] + i), numbers, to->second);
    if (to->rows > 2) to->third = fma_of(load(to->x[2] + i), numbers, to->third);
    if (to->rows > 3) to->fourth = fma_of(load(to->x[3] + i), numbers, to->fourth);
}

/* scale * number, for 16 signed bytes. */
INLINE void put_scaled(Sink *to, int64_t i, bytes16 numbers, vf scale) {
    for (int j = 0; j < 16 / W; j++) put(to, i + j * W, scale * floats(signed_part(numbers, j)));
}

/* scale * number + offset, for 16 unsigned bytes. */
INLINE void put_moved(Sink *to, int64_t i, bytes16 numbers, vf scale, vf offset) {
    for (int j = 0; j < 16 / W; j++)
        put(to, i + j * W, scale * floats(unsigned_part(numbers, j)) + offset);
}

/* The scales of a block: scale * number, for 16 signed bytes. */
INLINE void scaled(bytes16 numbers, vf scale, float *out) {
    for (int i = 0; i < 16 / W; i++) store(out + i * W, scale * floats(signed_part(numbers, i)));
}

/* What numbers of up to 4 bits stand for: scale * level + offset. With 16 lanes it is a vector from
   which one instruction chooses by the low 4 bits of an integer. */
#if defined(AVX512)
typedef vf Table;
INLINE Table scaled_table(const int8_t *levels, vf scale) {
    return scale * floats(signed_bytes((const uint8_t *)levels));
}
INLINE Table table_of(const int8_t *levels, vf scale, vf offset) {
    return scaled_table(levels, scale) + offset;
}
INLINE void put_chosen(Sink *to, int64_t i, Table table, bytes16 bytes, int shift) {
    __m512i index = (__m512i)(unsigned_part(bytes, 0) >> shift);
    put(to, i, (vf)_mm512_permutexvar_ps(index, (__m512)table));
}
#else
typedef struct {
    bytes16 levels;
    vf scale, offset;
    int moved;
} Table;
INLINE Table scaled_table(const int8_t *levels, vf scale) {
    return (Table){load_bytes((const uint8_t *)levels), scale, all(0), 0};
}
INLINE Table table_of(const int8_t *levels, vf scale, vf offset) {
    return (Table){load_bytes((const uint8_t *)levels), scale, offset, 1};
}
INLINE void put_chosen(Sink *to, int64_t i, Table table, bytes16 bytes, int shift) {
    bytes16 levels = look_up(table.levels, bytes >> shift & 15);
    for (int j = 0; j < 16 / W; j++) {
        vf numbers = table.scale * floats(signed_part(levels, j));
        put(to, i + j * W, table.moved ? numbers + table.offset : numbers);
    }
}
#endif

static const int8_t COUNTED[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
/* Twice the middle of the integers with the same high 4 of 5 bits, and of 6 bits less 32. */
static const int8_t OF_FIVE[16] = {1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61};
static const int8_t OF_SIX[16] = {-61, -53, -45, -37, -29, -21, -13, -5,
                                  3,   11,  19,  27,  35,  43,  51,  59};
static const int8_t CENTRED[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
/* Numbers of 2 and 3 bits, over and over. */
static const int8_t TWO_BITS[16] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
static const int8_t THREE_BITS[16] = {-4, -3, -2, -1, 0, 1, 2, 3, -4, -3, -2, -1, 0, 1, 2, 3};
static const int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
/* Twice the numbers of the format, which are multiplied by half of the scale. */
static const int8_t FP4_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* 32 numbers: those in the low 4 bits of 16 bytes, then those in the high 4 bits. */
INLINE void put_both(Sink *to, int64_t i, Table table, const uint8_t *at) {
    bytes16 both = load_bytes(at);
    put_chosen(to, i, table, both, 0);
    put_chosen(to, i + 16, table, both, 4);
}

INLINE uint32_t word(const uint8_t *at) {
    uint32_t four;
    memcpy(&four, at, 4);
    return four;
}

/* 16 in each byte whose bit is set, for bits 0 to 15 or 16 to 31; 0 elsewhere. */
INLINE bytes16 set_bits(uint32_t all_bits, int upper) {
#if defined(AVX512)
    return (bytes16)_mm_maskz_set1_epi8((__mmask16)(all_bits >> 16 * upper), 16);
#else
    const uint64_t bits[2] = {UINT64_C(0x8040201008040201), UINT64_C(0x8040201008040201)};
    const bytes16 lower_bytes = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    bytes16 bit = load_bytes((const uint8_t *)bits);
    bytes16 four = (bytes16)(words){all_bits, all_bits, all_bits, all_bits};
    bytes16 each = look_up(four, upper ? lower_bytes + 2 : lower_bytes);
    return (bytes16)((each & bit) == bit) & 16;
#endif
}

INLINE bytes16 fifth_bits(const uint8_t *at, int upper) { return set_bits(word(at), upper); }

/* 16 bytes, those with the opposite sign whose bit is set. */
INLINE bytes16 with_signs(bytes16 numbers, uint32_t signs, int upper) {
    bytes16 negative = 0 - (set_bits(signs, upper) >> 4);
    return (numbers ^ negative) - negative;
}

/* scale * number, for 32 signed bytes. */
INLINE void put_more_scaled(Sink *to, int64_t i, bytes32 numbers, vf first, vf second) {
    put_scaled(to, i, half_of(numbers, 0), first);
    put_scaled(to, i + 16, half_of(numbers, 1), second);
}

/* scale * number + offset, for 32 unsigned bytes. */
INLINE void put_more_moved(Sink *to, int64_t i, bytes32 numbers, vf scale, vf offset) {
    put_moved(to, i, half_of(numbers, 0), scale, offset);
    put_moved(to, i + 16, half_of(numbers, 1), scale, offset);
}

INLINE void block_q4_0(const uint8_t *at, int64_t c, Sink *to) {
    put_both(to, c, scaled_table(CENTRED, all(half(at))), at + 2);
}

INLINE void block_q4_1(const uint8_t *at, int64_t c, Sink *to) {
    put_both(to, c, table_of(COUNTED, all(half(at)), all(half(at + 2))), at + 4);
}

INLINE void block_q5_0(const uint8_t *at, int64_t c, Sink *to) {
    bytes16 both = load_bytes(at + 6);
    vf d = all(half(at));
    put_scaled(to, c, ((both & 15) | fifth_bits(at + 2, 0)) - 16, d);
    put_scaled(to, c + 16, (both >> 4 | fifth_bits(at + 2, 1)) - 16, d);
}

INLINE void block_q5_1(const uint8_t *at, int64_t c, Sink *to) {
    bytes16 both = load_bytes(at + 8);
    vf d = all(half(at)), m = all(half(at + 2));
    put_moved(to, c, (both & 15) | fifth_bits(at + 4, 0), d, m);
    put_moved(to, c + 16, both >> 4 | fifth_bits(at + 4, 1), d, m);
}

INLINE void block_q8_0(const uint8_t *at, int64_t c, Sink *to) {
    vf d = all(half(at));
    put_scaled(to, c, load_bytes(at + 2), d);
    put_scaled(to, c + 16, load_bytes(at + 18), d);
}

/* The 8 scales of Q4_K and Q5_K, then their 8 minima with the opposite sign. They are in 12 bytes of
   6-bit numbers, after two factors. */
INLINE void scales_k(const uint8_t *at, float *out) {
    uint32_t first = word(at + 4), second = word(at + 8), third = word(at + 12);
    words all_six = {first & 0x3f3f3f3f, (third & 0x0f0f0f0f) | (first >> 2 & 0x30303030),
                     second & 0x3f3f3f3f, (third >> 4 & 0x0f0f0f0f) | (second >> 2 & 0x30303030)};
    vf d = all(half(at)), dmin = all(-half(at + 2));
    for (int part = 0; part < 16 / W; part++) {
        vf six = floats(unsigned_part((bytes16)all_six, part));
#if W == 16
        store(out, six * choose(FIRST_HALF, d, dmin));
#else
        store(out + part * W, six * (part * W < 8 ? d : dmin));
#endif
    }
}

/* 64 numbers of 4 bits: 32 in the low 4 bits of bytes, and 32 in the high ones, which stand for
   factor * scale * level + offset. */
INLINE void put_fours(const uint8_t *at, int part, const float *scales, const int8_t *levels,
                      float factor, int64_t c, Sink *to) {
    bytes16 both[2] = {load_bytes(at + 16 + 32 * part), load_bytes(at + 32 + 32 * part)};
    for (int upper = 0; upper < 2; upper++) {
        int index = 2 * part + upper;
        Table table = table_of(levels, all(factor * scales[index]), all(scales[8 + index]));
        for (int i = 0; i < 2; i++)
            put_chosen(to, c + 32 * upper + 16 * i, table, both[i], 4 * upper);
    }
}

INLINE void part_q4_k(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    put_fours(at, part, scales, COUNTED, 1, c, to);
}

INLINE void part_q5_k_high(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    put_fours(at, part, scales, OF_FIVE, 0.5f, c, to);
}

/* `count` bits of each byte, from bit `from` on, moved to bit `to`. */
INLINE bytes32 moved_bits(bytes32 v, int from, int count, int to) {
    pairs kept = (pairs)(v & (uint8_t)(((1 << count) - 1) << from));
    return (bytes32)(to > from ? kept << (to - from) : kept >> (from - to));
}

INLINE void part_q5_k(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    bytes32 four = moved_bits(load_more(at + 48 + part / 2 * 32), part % 2 * 4, 4, 0);
    bytes32 fifth = moved_bits(load_more(at + 16), part, 1, 4);
    put_more_moved(to, c, four | fifth, all(scales[part]), all(scales[8 + part]));
}

INLINE void scales_q6_k(const uint8_t *at, float *out) {
    scaled(load_bytes(at + 192), all(half(at + 208)), out);
}

INLINE void part_q6_k(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    const uint8_t *low = at + part / 4 * 64 + part % 2 * 32, *high = at + 128 + part / 4 * 32;
    bytes32 four = moved_bits(load_more(low), part / 2 % 2 * 4, 4, 0);
    bytes32 two = moved_bits(load_more(high), part % 4 * 2, 2, 4);
    vf first = all(scales[2 * part]), second = all(scales[2 * part + 1]);
    put_more_scaled(to, c, (four | two) - 32, first, second);
}

INLINE void scales_q6_k_high(const uint8_t *at, float *out) {
    scaled(load_bytes(at + 128), all(half(at + 144)), out);
}

INLINE void part_q6_k_high(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    const uint8_t *fours = at + part / 4 * 64 + part % 2 * 32;
    for (int i = 0; i < 2; i++) {
        Table table = scaled_table(OF_SIX, all(0.5f * scales[2 * part + i]));
        put_chosen(to, c + 16 * i, table, load_bytes(fours + 16 * i), part / 2 % 2 * 4);
    }
}

/* The 16 scales, then the 16 minima with the opposite sign. */
INLINE void scales_q2_k(const uint8_t *at, float *out) {
    bytes16 both = load_bytes(at);
    scaled(both & 15, all(half(at + 80)), out);
    scaled(both >> 4, all(-half(at + 82)), out + 16);
}

INLINE void part_q2_k(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    for (int i = 0; i < 2; i++) {
        vf scale = all(scales[2 * part + i]), offset = all(scales[16 + 2 * part + i]);
        bytes16 four = load_bytes(at + 16 + part / 4 * 32 + 16 * i);
        put_chosen(to, c + 16 * i, table_of(TWO_BITS, scale, offset), four, part % 4 * 2);
    }
}

INLINE void scales_q3_k(const uint8_t *at, float *out) {
    uint32_t first = word(at + 96), second = word(at + 100), high = word(at + 104);
    words low = {first & 0x0f0f0f0f, second & 0x0f0f0f0f, first >> 4 & 0x0f0f0f0f,
                 second >> 4 & 0x0f0f0f0f};
    words top = {high << 4, high << 2, high, high >> 2};
    scaled((bytes16)(low | (top & 0x30303030)) - 32, all(half(at + 108)), out);
}

INLINE void part_q3_k(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    bytes32 two = moved_bits(load_more(at + 32 + part / 4 * 32), part % 4 * 2, 2, 0);
    bytes32 three = two | moved_bits(load_more(at), part, 1, 2);
    for (int i = 0; i < 2; i++) {
        Table table = scaled_table(THREE_BITS, all(scales[2 * part + i]));
        put_chosen(to, c + 16 * i, table, half_of(three, i), 0);
    }
}

INLINE void block_iq4_nl(const uint8_t *at, int64_t c, Sink *to) {
    put_both(to, c, scaled_table(IQ4_LEVELS, all(half(at))), at + 2);
}

INLINE void scales_iq4_xs(const uint8_t *at, float *out) {
    vf d = all(half(at));
    vi low = all_int((int32_t)word(at + 4)), high = all_int((int32_t)word(at) >> 16);
    for (int i = 0; i < 8; i += W) {
        vi which = signed_bytes((const uint8_t *)COUNTED) + i;
        vi six = (low >> (which * 4 & 31) & 15) | (high >> (which * 2 & 31) & 3) << 4;
        store(out + i, d * floats(six - 32));
    }
}

INLINE void part_iq4_xs(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    put_both(to, c, scaled_table(IQ4_LEVELS, all(scales[part])), at + 8 + 16 * part);
}

INLINE void block_mxfp4(const uint8_t *at, int64_t c, Sink *to) {
    put_both(to, c, scaled_table(FP4_DOUBLED, all(half_powers[at[0]])), at + 1);
}

/* The scale of blocks of integers: a float32 without its lowest byte, which is the zero. */
INLINE void scales_int4(const uint8_t *at, float *out) {
    uint32_t scale = word(at) & ~(uint32_t)255;
    memcpy(out, &scale, 4);
}

INLINE Table int4_table(const uint8_t *at, float scale) {
    int8_t levels[16];
    bytes16 moved = load_bytes((const uint8_t *)COUNTED) - at[0];
    memcpy(levels, &moved, 16);
    return scaled_table(levels, all(scale));
}

INLINE void block_int4(const uint8_t *at, int64_t c, Sink *to) {
    float scale;
    scales_int4(at, &scale);
    put_both(to, c, int4_table(at, scale), at + 4);
}

/* 64 numbers: 32 in the low 4 bits of 32 bytes, then 32 in the high ones. */
INLINE void part_int4(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    Table table = int4_table(at, scales[0]);
    for (int i = 0; i < 4; i++)
        put_chosen(to, c + 16 * i, table, load_bytes(at + 4 + 32 * part + i % 2 * 16), i / 2 * 4);
}

INLINE void part_int8(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    for (int i = 0; i < 32; i += W) {
        vi integers = unsigned_bytes(at + 4 + 32 * part + i) - at[0];
        put(to, c + i, floats(integers) * all(scales[0]));
    }
}

/* Half the scales, since levels are twice the numbers. */
INLINE void scales_nvfp4(const uint8_t *at, float *out) {
    float factor;
    memcpy(&factor, at, 4);
    for (int i = 0; i < 8; i++) {
        /* 2^120 moves the exponent, and makes denormal numbers normal. */
        uint32_t bits = (uint32_t)(at[4 + i] & 127) << 20;
        float scale;
        memcpy(&scale, &bits, 4);
        scale = at[4 + i] & 128 ? -scale : scale;
        out[i] = scale * 0x1p120f * (factor * 0.5f);
    }
}

/* 64 numbers: 32 in the low 4 bits of 32 bytes, then 32 in the high ones. */
INLINE void part_nvfp4(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    for (int i = 0; i < 4; i++) {
        Table table = scaled_table(FP4_DOUBLED, all(scales[4 * part + i]));
        bytes16 both = load_bytes(at + 12 + 32 * part + i % 2 * 16);
        put_chosen(to, c + 16 * i, table, both, i / 2 * 4);
    }
}

INLINE void scales_f8_e4m3(const uint8_t *at, float *out) { memcpy(out, at + 128, 4); }

INLINE void part_f8_e4m3(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    for (int i = 0; i < 32; i += W) {
        vi byte = unsigned_bytes(at + 32 * part + i), magnitude = byte & 127;
        /* 2^120 moves the exponent, and makes denormal numbers normal. */
        vf exact = (vf)(magnitude << 20) * all(0x1p120f);
        vi bits = (vi)exact | ((magnitude == 127) & 0x7fc00000) | (byte & 128) << 24;
        put(to, c + i, (vf)bits * all(scales[0]));
    }
}

/* The codes of F8_HIGH. */
static const int8_t F8_LEVELS[16] = {2,  6,  9,  13, 17, 21, 25,  29,
                                     34, 42, 50, 58, 68, 84, 100, 116};

INLINE void scales_f8_high(const uint8_t *at, float *out) { memcpy(out, at, 4); }

/* 32 numbers: their signs are bits, and their codes the low or the high 4 bits of 32 bytes. */
INLINE void part_f8_high(const uint8_t *at, int part, const float *scales, int64_t c, Sink *to) {
    bytes16 levels = load_bytes((const uint8_t *)F8_LEVELS);
    for (int i = 0; i < 2; i++) {
        bytes16 codes = load_bytes(at + 20 + part / 2 * 32 + 16 * i) >> part % 2 * 4 & 15;
        bytes16 numbers = with_signs(look_up(levels, codes), word(at + 4 + 4 * part), i);
        put_scaled(to, c + 16 * i, numbers, all(scales[0]));
    }
}

/* Dense numbers, a vector at a time, and the one at an address. */
INLINE void vector_f32(const uint8_t *at, int64_t c, Sink *to) { put(to, c, load((const float *)at)); }
INLINE void vector_f16(const uint8_t *at, int64_t c, Sink *to) { put(to, c, from_f16(at)); }
INLINE void vector_bf16(const uint8_t *at, int64_t c, Sink *to) { put(to, c, from_bf16(at)); }

INLINE float dense_one(int64_t format, const uint8_t *at) {
    if (format == F16) return half(at);
    uint32_t bits = format == BF16 ? (uint32_t)(at[0] | at[1] << 8) << 16 : word(at);
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* Decodes `count` dense numbers to memory. */
INLINE void decode_dense(int64_t format, const uint8_t *at, int64_t count, float *out) {
    int64_t i = 0, size = format == F32 ? 4 : 2;
    Sink to = {.out = out};
    for (; i + W <= count; i += W)
        if (format == F32) vector_f32(at + size * i, i, &to);
        else if (format == F16) vector_f16(at + size * i, i, &to);
        else vector_bf16(at + size * i, i, &to);
    for (; i < count; i++) out[i] = dense_one(format, at + size * i);
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
