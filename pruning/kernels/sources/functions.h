/* Functions of vectors, rounded in the same places on every processor. */
#ifndef FUNCTIONS_H
#define FUNCTIONS_H

#include "vectors.h"

#define EACH(number) ((number) - (vec){0})
#define TURN 12582912.0f /* added to a small number, it leaves the nearest whole number in the last bits */
#define PARTS (16 / LANES) /* sums have 16 parts, whatever the width of vectors */

/* exp(x) for x at most 0, and exp(-87) below -87. */
static inline vec exponential(vec x) {
    static const float series[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    x = larger(EACH(-87.0f), x);
    vec twos = fused(x, EACH(1.44269504f), EACH(TURN));
    ivec power = (ivec)twos << 23;
    twos -= TURN;
    vec rest = fused(twos, EACH(-1.42860677e-6f), fused(twos, EACH(-0.693145752f), x));
    vec value = EACH(1.0f / 5040);
    for (int i = 0; i < 7; i++) value = fused(value, rest, EACH(series[i]));
    return (vec)((ivec)value + power) + (x - x); /* the last term keeps NaN */
}

/* The sum of 16 numbers. */
static inline float total(const vec *parts) {
    float sums[16];
    memcpy(sums, parts, sizeof(sums));
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

#endif
