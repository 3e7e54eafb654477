/* Vectors of the processor's width, in the compiler's portable form. */
#ifndef VECTORS_H
#define VECTORS_H

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

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));

/* What a kernel needs besides inputs and outputs: numbers, arrays, and the range to which outputs are clamped. Every
   kernel is a function (call, x, added, y, threads) that returns DONE or a reason; `added` is NULL, or has the shape of
   y and is added before the clamp. */
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

static inline void copy(float *to, const float *from, long count) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) *(vec *)(to + i) = *(const vec *)(from + i);
    for (; i + 4 <= count; i += 4) *(four *)(to + i) = *(const four *)(from + i);
    for (; i < count; i++) to[i] = from[i];
}

#endif
