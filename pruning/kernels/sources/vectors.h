/* Vectors of the processor's width, in the compiler's portable form. */
#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));

/* What a kernel needs besides inputs and outputs: numbers, arrays, and the range to which outputs are clamped. Every
   kernel is a function (call, x, added, y, threads) that returns DONE or a reason; `added` is NULL, or has the shape of
   y and is added before the clamp. A kernel of three inputs has the second and the third in an array in its place. */
typedef struct {
    int64_t numbers[8];
    const void *arrays[12];
    float low, high;
} Call;

enum { DONE = 0, NO_MEMORY = 1, TOO_LARGE = 2 };

static inline long least(long a, long b) { return a < b ? a : b; }
static inline long most(long a, long b) { return a > b ? a : b; }
static inline long up(long a, long b) { return (a + b - 1) / b; }

/* NaN stays NaN, as in torch's clamp. */
static inline float clamped(float value, float low, float high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

/* a > b ? a : b, and a < b ? a : b: b if either is NaN. */
#if defined(__AVX512F__)
static inline vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
static inline vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
static inline vec smaller(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
#elif defined(__SSE__)
static inline vec larger(vec a, vec b) { return (vec)_mm_max_ps((__m128)a, (__m128)b); }
static inline vec smaller(vec a, vec b) { return (vec)_mm_min_ps((__m128)a, (__m128)b); }
#else
static inline vec chosen(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }
static inline vec larger(vec a, vec b) { return chosen(a > b, a, b); }
static inline vec smaller(vec a, vec b) { return chosen(a < b, a, b); }
#endif

/* NaN stays NaN, as in torch's clamp. */
static inline vec clamped_vector(vec value, float low, float high) {
    return smaller(high - (vec){0}, larger(low - (vec){0}, value));
}

/* a * b + c, rounded once. */
static inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

#if defined(__AVX512F__)
#define FIRST(count) ((__mmask16)((1U << (count)) - 1))
#elif defined(__AVX__)
static inline __m256i first_of(long count) {
    static const int32_t lanes[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i *)(lanes + LANES - count));
}
#endif

/* Write the first elements of a vector, and no other memory. */
static inline void put(void *to, vec value, long count) {
    if (count == LANES) {
        *(vec *)to = value;
        return;
    }
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, FIRST(count), (__m512)value);
#elif defined(__AVX__)
    _mm256_maskstore_ps(to, first_of(count), (__m256)value);
#else
    vec last = value; /* a copy, so that whole vectors stay in registers */
    memcpy(to, &last, sizeof(float) * count);
#endif
}

/* Read the first elements of a vector, and no other memory; the others are 0. */
static inline vec got(const void *from, long count) {
    if (count == LANES) return *(const vec *)from;
#if defined(__AVX512F__)
    return (vec)_mm512_maskz_loadu_ps(FIRST(count), from);
#elif defined(__AVX__)
    return (vec)_mm256_maskload_ps(from, first_of(count));
#else
    vec found = {0};
    memcpy(&found, from, sizeof(float) * count);
    return found;
#endif
}

static inline void copy(float *to, const float *from, long count) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) *(vec *)(to + i) = *(const vec *)(from + i);
    for (; i + 4 <= count; i += 4) *(four *)(to + i) = *(const four *)(from + i);
    for (; i < count; i++) to[i] = from[i];
}

#endif
