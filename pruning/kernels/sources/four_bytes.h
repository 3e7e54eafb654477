/* Floats as bytes, and products of four pairs of bytes at once, the same on every processor. */
#ifndef FOUR_BYTES_H
#define FOUR_BYTES_H

#include "vectors.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* sum + the four products of the unsigned bytes of `inputs` and the signed bytes of `weights`, in each element. */
#if LANES == 16 && defined(__AVX512VNNI__)
static inline ivec plus_bytes(ivec sum, ivec inputs, ivec weights) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)inputs, (__m512i)weights);
}
#elif LANES == 8 && defined(__AVXVNNI__)
static inline ivec plus_bytes(ivec sum, ivec inputs, ivec weights) {
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)inputs, (__m256i)weights);
}
#elif (LANES == 8 && defined(__AVX2__)) || (LANES == 16 && defined(__AVX512BW__))
#if LANES == 8
#define PAIRS_OF_HALVES(a, b) (ivec)_mm256_madd_epi16((__m256i)(a), (__m256i)(b))
#else
#define PAIRS_OF_HALVES(a, b) (ivec)_mm512_madd_epi16((__m512i)(a), (__m512i)(b))
#endif
typedef int16_t halves __attribute__((vector_size(4 * LANES)));
static inline ivec plus_bytes(ivec sum, ivec inputs, ivec weights) { /* in 16 bits: pairs of 8 bits would saturate */
    halves x = (halves)inputs, w = (halves)weights;
    return sum + PAIRS_OF_HALVES(x & 255, w << 8 >> 8) + PAIRS_OF_HALVES(x >> 8 & 255, w >> 8);
}
#elif LANES == 4 && defined(__ARM_FEATURE_MATMUL_INT8)
static inline ivec plus_bytes(ivec sum, ivec inputs, ivec weights) {
    return (ivec)vusdotq_s32((int32x4_t)sum, (uint8x16_t)inputs, (int8x16_t)weights);
}
#elif LANES == 4 && defined(__ARM_FEATURE_DOTPROD) /* signed bytes alone: x = (x - 128) + 64 + 64 */
static inline ivec plus_bytes(ivec sum, ivec inputs, ivec weights) {
    int8x16_t w = (int8x16_t)weights, half = vdupq_n_s8(64);
    int32x4_t found = vdotq_s32((int32x4_t)sum, veorq_s8((int8x16_t)inputs, vdupq_n_s8(-128)), w);
    return (ivec)vdotq_s32(vdotq_s32(found, half, w), half, w);
}
#else
static inline ivec plus_bytes(ivec sum, ivec inputs, ivec weights) {
    for (int k = 0; k < 32; k += 8) sum += (inputs >> k & 255) * (weights << (24 - k) >> 24);
    return sum;
}
#endif

/* Whole numbers become floats: (sum + first) * scale + bias, rounded once. */
static inline void scale_whole(float *sums, int vectors, int32_t first, float scale, float bias) {
    for (vec *each = (vec *)sums; each < (vec *)sums + vectors; each++)
        *each = fused(__builtin_convertvector((ivec)*each + first, vec), scale - (vec){0}, bias - (vec){0});
}

/* A float becomes the byte round(x / scale) + zero, half to even; what lies outside is taken to the nearest byte, and
   NaN to the lowest. Adding and subtracting 1.5 * 2^23 rounds, on every processor. */
typedef struct {
    float inverse, low, high;
    int zero;
} Rounding;

/* Of 1 / scale and zero point; 1 / scale is 0 where nothing is rounded. */
static inline Rounding rounding_of(const float *given) {
    return (Rounding){given[0], -given[1], 255 - given[1], (int)given[1]};
}

static inline uint32_t byte_of(float x, Rounding r) {
    float value = x * r.inverse;
    value = value > r.low ? value : r.low;
    value = value < r.high ? value : r.high;
    return (uint32_t)((int32_t)(value + 12582912.0f - 12582912.0f) + r.zero);
}

/* The same for the elements of a vector. */
static inline ivec bytes_of(vec x, Rounding r) {
    vec value = smaller(larger(x * r.inverse, r.low - (vec){0}), r.high - (vec){0});
    return __builtin_convertvector(value + 12582912.0f - 12582912.0f, ivec) + r.zero;
}

/* Rows of floats become bytes, in memory that the caller frees; zeros fill up the last four of a row. */
static inline uint8_t *rows_in_bytes(const float *x, long rows, long width, Rounding rounding, int threads) {
    long pitch = 4 * up(width, 4);
    uint8_t *bytes = malloc(most(1, rows * pitch));
    if (!bytes) return NULL;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long n = 0; n < rows; n++) {
        uint8_t *to = bytes + n * pitch;
        for (long k = 0; k < width; k++) to[k] = (uint8_t)byte_of(x[n * width + k], rounding);
        for (long k = width; k < pitch; k++) to[k] = 0;
    }
    return bytes;
}

/* Up to four rows of floats, clamped, as one row of four bytes: the element `at` of each. */
static inline vec joined(const float *rows, long held, long pitch, long at, float low, float high, Rounding rounding) {
    ivec found = {0};
    for (long k = 0; k < held; k++)
        found |= bytes_of(clamped_vector(*(const vec *)(rows + k * pitch + at), low, high), rounding) << 8 * (int)k;
    return (vec)found;
}

/* Rows of floats, clamped, become a quarter as many rows of four bytes, in place; a row has whole vectors. */
static inline void join_rows(float *sums, long rows, long pitch, float low, float high, Rounding rounding) {
    for (long r = 0; r < rows; r += 4)
        for (long at = 0; at < pitch; at += LANES)
            *(vec *)(sums + r / 4 * pitch + at) =
                joined(sums + r * pitch, least(4, rows - r), pitch, at, low, high, rounding);
}

#endif
