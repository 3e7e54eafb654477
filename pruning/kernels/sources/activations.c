/* Activations, element by element. All products and sums are rounded in the same places on every processor. */
#include "functions.h"

#define AT_ONCE 4096

static inline vec polynomial(const float *factors, int degree, vec x) {
    vec value = EACH(factors[degree]);
    for (int i = degree - 1; i >= 0; i--) value = fused(value, x, EACH(factors[i]));
    return value;
}

/* max(x, 0) - |x| * tail, where tail, the probability that a normal number is above |x|, is exp(-x^2 / 2) times a
   quotient of polynomials: fitted to 6e-9 of it for |x| up to 13.3. */
static inline vec gelu_of(vec x) {
    static const float above[] = {0.5f, 0.43500095f, 0.18077715f, 0.03979927f, 0.00399084f};
    static const float below[] = {1.0f, 1.66788671f, 1.19233197f, 0.46297647f, 0.0997695f, 0.01000341f};
    vec size = smaller(EACH(13.0f), larger(x, -x));
    vec tail = polynomial(above, 4, size) / polynomial(below, 5, size) * exponential(size * size * -0.5f);
    return fused(-size, tail, larger(EACH(0.0f), x));
}

/* x * sigmoid(x * (a + b * x^2)), from the factors a and b. */
static inline vec gated_of(vec x, const float *factors) {
    vec size = smaller(EACH(100.0f), larger(x, -x));
    vec power = exponential(fused(size * size, EACH(factors[1]), EACH(factors[0])) * -size);
    return fused(smaller(EACH(0.0f), larger(EACH(-100.0f), x)), power, larger(EACH(0.0f), x)) / (power + 1.0f);
}

/* y[i] = FORMULA of a vector x; numbers: rows, columns; arrays: constants. */
#define ACTIVATION(name, formula)                                                               \
    int name(const Call *call, const float *from, const float *added, float *to, int threads) { \
        long count = call->numbers[0] * call->numbers[1];                                       \
        (void)added;                                                                            \
        _Pragma("omp parallel for num_threads(threads) if (threads > 1 && count > AT_ONCE)")    \
        for (long first = 0; first < count; first += AT_ONCE)                                   \
            for (long i = first; i < least(count, first + AT_ONCE); i += LANES) {               \
                vec x = got(from + i, least(LANES, count - i));                                 \
                put(to + i, formula, least(LANES, count - i));                                  \
            }                                                                                   \
        return DONE;                                                                            \
    }

ACTIVATION(gelu, gelu_of(x))
ACTIVATION(gated, gated_of(x, call->arrays[0]))
