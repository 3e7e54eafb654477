/* Products of sparse rows with tiles of columns: each weight times up to MOST_VECTORS vectors, sums in registers.

   A block is a range of input columns whose part of a tile fits into the L1 cache; rows of a block lie one after
   another: the weights of row `r` in block `b` are those from starts[b * outputs + r] to the next start.

   An element of inputs and weights has four bytes: a float, or four unsigned bytes of inputs and four signed bytes of
   weights, which are multiplied in pairs. Sums of bytes are whole numbers, so their order does not matter. */
#ifndef BROADCAST_H
#define BROADCAST_H

#include "groups.h"

#define MOST_VECTORS 8
#define ROWS_AT_ONCE 64
#define SUMS (ROWS_AT_ONCE * MOST_VECTORS * LANES)

typedef void Products(long rows, const int32_t *starts, const int32_t *places, int shift, const void *values,
                      const void *inputs, const void *first, float *sums);

/* The two sides of products: `first` has the first sum of each row. With `scale`, sums are whole numbers and become
   sum * scale[row] + bias[row], rounded once. Without `products` rows come in groups that share blocks. */
typedef struct {
    Products *const *products;
    const void *values, *first;
    const float *scale, *bias;
} Terms;

static inline vec plus_floats(vec sum, vec input, vec weight) { return sum + weight * input; }

/* Without `first` the sums go on from those of the block before. */
#define PRODUCTS(NAME, V, NUMBER, VECTOR, PLUS)                                                               \
    static void NAME##_##V(long rows, const int32_t *starts, const int32_t *places, int shift,               \
                           const void *values, const void *inputs, const void *first, float *sums) {          \
        for (long r = 0; r < rows; r++, sums += V * LANES) {                                                  \
            VECTOR sum[V];                                                                                    \
            for (int v = 0; v < V; v++)                                                                       \
                if (first) sum[v] = ((const NUMBER *)first)[r] - (VECTOR){0};                                 \
                else sum[v] = *(VECTOR *)(sums + v * LANES);                                                  \
            for (int32_t i = starts[r]; i < starts[r + 1]; i++) {                                             \
                const NUMBER *from = (const NUMBER *)inputs + ((long)places[i] << shift);                     \
                VECTOR value = ((const NUMBER *)values)[i] - (VECTOR){0};                                     \
                for (int v = 0; v < V; v++) sum[v] = PLUS(sum[v], *(const VECTOR *)(from + v * LANES), value); \
            }                                                                                                 \
            for (int v = 0; v < V; v++) *(VECTOR *)(sums + v * LANES) = sum[v];                               \
        }                                                                                                     \
    }
#define ALL_PRODUCTS(NAME, ...)                                                                               \
    PRODUCTS(NAME, 1, __VA_ARGS__)                                                                            \
    PRODUCTS(NAME, 2, __VA_ARGS__)                                                                            \
    PRODUCTS(NAME, 3, __VA_ARGS__)                                                                            \
    PRODUCTS(NAME, 4, __VA_ARGS__)                                                                            \
    PRODUCTS(NAME, 5, __VA_ARGS__)                                                                            \
    PRODUCTS(NAME, 6, __VA_ARGS__)                                                                            \
    PRODUCTS(NAME, 7, __VA_ARGS__)                                                                            \
    PRODUCTS(NAME, 8, __VA_ARGS__)                                                                            \
    static Products *const NAME[MOST_VECTORS + 1] = {                                                         \
        NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, NAME##_8,                 \
    };

ALL_PRODUCTS(of_floats, float, vec, plus_floats)
ALL_PRODUCTS(of_bytes, int32_t, ivec, plus_bytes)

static inline Terms float_terms(const void *values, const void *bias) {
    return (Terms){of_floats, values, bias, NULL, NULL};
}

/* `group`: the number of rows that share blocks, 1 or GROUP. */
static inline Terms byte_terms(long group, const void *values, const void *first, const void *scale, const void *bias) {
    return (Terms){group == 1 ? of_bytes : NULL, values, first, scale, bias};
}

/* The number of starts, but for the last one. */
static inline long started(const Terms *terms, long outputs, long blocks) {
    return terms->products ? outputs * blocks : up(outputs, GROUP);
}

/* The sums of some rows over all blocks, for a tile of `vectors` vectors of inputs. */
static inline void tile_sums(long first, long rows, long outputs, long blocks, int vectors, const int32_t *starts,
                             const int32_t *places, int shift, const Terms *terms, const void *inputs, float *sums) {
    const int32_t *starting = (const int32_t *)terms->first + first; /* four bytes each, whatever they hold */
    if (!terms->products)
        group_sums(rows, vectors, starts + first / GROUP, places, shift, terms->values, inputs, (int32_t *)(void *)sums);
    else for (long b = 0; b < blocks; b++)
        terms->products[vectors](rows, starts + b * outputs + first, places, shift, terms->values, inputs,
                                 b ? NULL : starting, sums);
    if (terms->scale)
        for (long r = 0; r < rows; r++)
            scale_whole(sums + r * vectors * LANES, vectors, terms->products ? 0 : starting[r], terms->scale[first + r],
                        terms->bias[first + r]);
}

#endif
