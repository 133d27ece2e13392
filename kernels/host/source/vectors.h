/* Vectors of W floats, over the vector types of GCC and Clang. What these cannot express is written
   for each make of vector units. A file defines PLAIN, AVX2, AVX512 or NEON before it includes
   this one. */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(AVX2) || defined(AVX512)
#include <immintrin.h>
#elif defined(NEON)
#include <arm_neon.h>
#endif

#if defined(AVX512)
#define W 16
#elif defined(AVX2)
#define W 8
#else
#define W 4
#endif

/* Whether vectors are those of a processor, and not of the compiler alone. */
#if defined(PLAIN)
#define HAS_UNITS 0
#define UNROLL(times)
#else
#define HAS_UNITS 1
#define AS_PRAGMA(text) _Pragma(#text)
#define UNROLL(times) AS_PRAGMA(GCC unroll times)
#endif

#define NOINLINE __attribute__((noinline))
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef float vf_any __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint8_t bytes32 __attribute__((vector_size(32)));
typedef uint16_t pairs __attribute__((vector_size(32)));
typedef uint64_t quads __attribute__((vector_size(16)));
#define EACH_BYTE(x) (UINT64_C(0x0101010101010101) * (x))
typedef uint8_t bytes32_any __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint8_t bytes16_any __attribute__((vector_size(16), aligned(1), may_alias));

INLINE vf load(const float *at) { return *(const vf_any *)at; }
INLINE void store(float *at, vf v) { *(vf_any *)at = v; }
INLINE vf all(float x) { return x - (vf){0}; }
INLINE vi all_int(int32_t x) { return x - (vi){0}; }
INLINE bytes16 load_bytes(const uint8_t *at) { return *(const bytes16_any *)at; }
INLINE bytes32 load_more(const uint8_t *at) { return *(const bytes32_any *)at; }

/* The first 16 bytes of 32, or the others. */
INLINE bytes16 half_of(bytes32 v, int upper) {
#if defined(AVX2) || defined(AVX512)
    return upper ? (bytes16)_mm256_extracti128_si256((__m256i)v, 1)
                 : (bytes16)_mm256_castsi256_si128((__m256i)v);
#else
    bytes16 out;
    memcpy(&out, (const uint8_t *)&v + 16 * upper, 16);
    return out;
#endif
}

#if W == 16
static const vi FIRST_HALF = {-1, -1, -1, -1, -1, -1, -1, -1};
#endif
INLINE vf choose(vi where, vf a, vf b) { return (vf)((where & (vi)a) | (~where & (vi)b)); }

/* The integers of W unsigned or signed bytes at an address, of the `part`th W of 16 bytes, and of W
   numbers of 16 bits. */
#if defined(AVX512)
INLINE vi unsigned_part(bytes16 v, int part) {
    (void)part;
    return (vi)_mm512_cvtepu8_epi32((__m128i)v);
}
INLINE vi signed_part(bytes16 v, int part) {
    (void)part;
    return (vi)_mm512_cvtepi8_epi32((__m128i)v);
}
INLINE vi unsigned_bytes(const uint8_t *at) {
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
}
INLINE vi signed_bytes(const uint8_t *at) {
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at));
}
INLINE vi halves(const uint8_t *at) {
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
}
INLINE vf floats(vi v) { return (vf)_mm512_cvtepi32_ps((__m512i)v); }
INLINE vf fma_of(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf most(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vi least_int(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE vf from_f16(const uint8_t *at) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}
#elif defined(AVX2)
INLINE vi unsigned_part(bytes16 v, int part) {
    return (vi)_mm256_cvtepu8_epi32(part ? _mm_srli_si128((__m128i)v, 8) : (__m128i)v);
}
INLINE vi signed_part(bytes16 v, int part) {
    return (vi)_mm256_cvtepi8_epi32(part ? _mm_srli_si128((__m128i)v, 8) : (__m128i)v);
}
INLINE vi unsigned_bytes(const uint8_t *at) {
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
}
INLINE vi signed_bytes(const uint8_t *at) {
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
}
INLINE vi halves(const uint8_t *at) {
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
}
INLINE vf floats(vi v) { return (vf)_mm256_cvtepi32_ps((__m256i)v); }
INLINE vf fma_of(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf most(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vi least_int(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }
INLINE vf from_f16(const uint8_t *at) {
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}
#else
INLINE vi unsigned_part(bytes16 v, int part) {
    return (vi){v[4 * part], v[4 * part + 1], v[4 * part + 2], v[4 * part + 3]};
}
INLINE vi signed_part(bytes16 v, int part) {
    return (vi){(int8_t)v[4 * part], (int8_t)v[4 * part + 1], (int8_t)v[4 * part + 2],
                (int8_t)v[4 * part + 3]};
}
INLINE vi unsigned_bytes(const uint8_t *at) { return (vi){at[0], at[1], at[2], at[3]}; }
INLINE vi signed_bytes(const uint8_t *at) {
    return (vi){(int8_t)at[0], (int8_t)at[1], (int8_t)at[2], (int8_t)at[3]};
}
INLINE vi halves(const uint8_t *at) {
    uint16_t h[4];
    memcpy(h, at, sizeof h);
    return (vi){h[0], h[1], h[2], h[3]};
}
INLINE vf floats(vi v) { return __builtin_convertvector(v, vf); }
INLINE vf most(vf a, vf b) { return choose(a > b, a, b); }
INLINE vi least_int(vi a, vi b) { return (a & (a < b)) | (b & ~(a < b)); }
#if defined(NEON)
INLINE vf fma_of(vf a, vf b, vf c) {
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
INLINE vf fma_of(vf a, vf b, vf c) { return a * b + c; }
#endif
INLINE vf from_f16(const uint8_t *at) {
    vi h = halves(at), magnitude = (h & 0x7fff) << 13;
    /* 2^112 moves the exponent, and makes denormal numbers normal. */
    vf moved = (vf)magnitude * all(0x1p112f);
    vi special = (vi)((h & 0x7c00) == 0x7c00);
    vi bits = (special & (magnitude | 0x7f800000)) | (~special & (vi)moved);
    return (vf)(bits | ((h & 0x8000) << 16));
}
#endif

INLINE vf from_bf16(const uint8_t *at) { return (vf)(halves(at) << 16); }

/* Every number of half precision, by its bits. A load from this table can fill a whole vector, while
   a conversion takes units that numbers need too. */
extern float half_numbers[1 << 16];
/* Half of every power of two that an exponent of 8 bits stands for. */
extern float half_powers[1 << 8];
/* Tables of IQ2 and IQ3 (`weights/grids.py`): indices stand for words of 4 numbers or for pairs of words.
   Python fills them before blocks of these types are read. */
extern uint32_t grid_iq3_xxs[256], grid_iq3_s[512], grid_iq2_xxs[512], grid_iq2_xs[1024], grid_iq2_s[2048];

/* The number of half precision at an address. */
INLINE float half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return half_numbers[bits];
}

/* Entries of a table of 16, chosen by bytes below 16. */
INLINE bytes16 look_up(bytes16 table, bytes16 index) {
#if defined(AVX2) || defined(AVX512)
    return (bytes16)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#elif defined(NEON)
    return (bytes16)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else
    bytes16 out;
    for (int i = 0; i < 16; i++) out[i] = table[index[i]];
    return out;
#endif
}

/* The sum of a vector, always in the same order. */
INLINE float sum_of(vf v) {
#if defined(AVX512)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(AVX2)
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
#else
    return v[0] + v[2] + (v[1] + v[3]);
#endif
}

/* The greatest number of a vector without NaN, and whether any integer of a vector is not 0. */
#if defined(AVX512)
INLINE float greatest_of(vf v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE int any(vi v) { return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0; }
#elif defined(AVX2)
INLINE float greatest_of(vf v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
INLINE int any(vi v) { return !_mm256_testz_si256((__m256i)v, (__m256i)v); }
#else
INLINE float greatest_of(vf v) {
    float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}
INLINE int any(vi v) { return (v[0] | v[1] | v[2] | v[3]) != 0; }
#endif

/* The sums of four vectors, each in the same order as the others. */
INLINE void four_sums(const vf *v, float *out) {
#if defined(AVX512)
    __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    a = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    c = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d first = _mm512_castps_pd(a), second = _mm512_castps_pd(c);
    a = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                      _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(AVX2)
    __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
    a = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    c = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    __m256d first = _mm256_castps_pd(a), second = _mm256_castps_pd(c);
    a = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(first, second)),
                      _mm256_castpd_ps(_mm256_unpackhi_pd(first, second)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
#else
    for (int i = 0; i < 4; i++) out[i] = v[i][0] + v[i][2] + (v[i][1] + v[i][3]);
#endif
}
