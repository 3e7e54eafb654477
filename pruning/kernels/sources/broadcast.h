/* Products of sparse rows with tiles of columns: each weight times up to MOST_VECTORS vectors, sums in registers.

   A block is a range of input columns whose part of a tile fits into the L1 cache; rows of a block lie one after
   another: the weights of row `r` in block `b` are those from starts[b * outputs + r] to the next start. */
#ifndef BROADCAST_H
#define BROADCAST_H

#include "vectors.h"

#define MOST_VECTORS 8
#define ROWS_AT_ONCE 64
#define SUMS (ROWS_AT_ONCE * MOST_VECTORS * LANES)

typedef void Products(long rows, const int32_t *starts, const int32_t *places, int shift, const float *values,
                      const float *inputs, const float *bias, float *sums);

/* Without `bias` the sums go on from those of the block before. */
#define PRODUCTS(V)                                                                                           \
    static void products_##V(long rows, const int32_t *starts, const int32_t *places, int shift,             \
                             const float *values, const float *inputs, const float *bias, float *sums) {      \
        for (long r = 0; r < rows; r++, sums += V * LANES) {                                                  \
            vec sum[V];                                                                                       \
            for (int v = 0; v < V; v++)                                                                       \
                if (bias) sum[v] = bias[r] - (vec){0};                                                        \
                else sum[v] = *(vec *)(sums + v * LANES);                                                     \
            for (int32_t i = starts[r]; i < starts[r + 1]; i++) {                                             \
                const float *from = inputs + ((long)places[i] << shift);                                      \
                vec value = values[i] - (vec){0};                                                             \
                for (int v = 0; v < V; v++) sum[v] += value * *(const vec *)(from + v * LANES);               \
            }                                                                                                 \
            for (int v = 0; v < V; v++) *(vec *)(sums + v * LANES) = sum[v];                                  \
        }                                                                                                     \
    }

PRODUCTS(1)
PRODUCTS(2)
PRODUCTS(3)
PRODUCTS(4)
PRODUCTS(5)
PRODUCTS(6)
PRODUCTS(7)
PRODUCTS(8)

static Products *const PRODUCTS_OF[MOST_VECTORS + 1] = {
    NULL, products_1, products_2, products_3, products_4, products_5, products_6, products_7, products_8,
};

/* The sums of some rows over all blocks, for a tile of `vectors` vectors of inputs. */
static inline void tile_sums(long first, long rows, long outputs, long blocks, int vectors, const int32_t *starts,
                             const int32_t *places, int shift, const float *values, const float *inputs,
                             const float *bias, float *sums) {
    for (long b = 0; b < blocks; b++)
        PRODUCTS_OF[vectors](rows, starts + b * outputs + first, places, shift, values, inputs,
                             b ? NULL : bias + first, sums);
}

#endif
