/* Attention of several heads: each query's average of the values, weighted by its products with the keys. */
#include "functions.h"

#define TOGETHER 6 /* queries that share what is read: with two vectors each, their sums fit 16 registers */

/* Let `to` have the keys of a head with their channels as rows, and 0 after the last key. */
static void turn_keys(const float *keys, long pitch, long count, long padded, long width, float *to) {
    for (long c = 0; c < width; c++) {
        for (long k = 0; k < count; k++) to[c * padded + k] = keys[k * pitch + c];
        for (long k = count; k < padded; k++) to[c * padded + k] = 0;
    }
}

/* The products of some queries with one or two vectors of keys, times a factor. */
static inline void products_with(const float *const *queries, const float *keys, long padded, long width, float factor,
                                 float *to, const int vectors) {
    vec sums[TOGETHER][2] = {0};
    for (long c = 0; c < width; c++)
        for (int i = 0; i < TOGETHER; i++)
            for (int j = 0; j < vectors; j++)
                sums[i][j] = fused(EACH(queries[i][c]), *(const vec *)(keys + c * padded + j * LANES), sums[i][j]);
    for (int i = 0; i < TOGETHER; i++)
        for (int j = 0; j < vectors; j++) *(vec *)(to + i * padded + j * LANES) = sums[i][j] * factor;
}

static void products_of(const float *const *queries, const float *keys, long padded, long width, float factor,
                        float *to) {
    long k = 0;
    for (; k + LANES < padded; k += 2 * LANES)
        products_with(queries, keys + k, padded, width, factor, to + k, 2);
    if (k < padded) products_with(queries, keys + k, padded, width, factor, to + k, 1);
}

/* Replace products by exp(product - largest); return their sum. */
static float weights_of(float *products, long count, long padded) {
    vec largest = EACH(-INFINITY), sums[PARTS] = {0};
    for (long k = count; k < padded; k++) products[k] = -INFINITY;
    for (long k = 0; k < padded; k += LANES) largest = larger(largest, *(vec *)(products + k));
    float top = largest[0];
    for (int i = 1; i < LANES; i++) top = largest[i] > top ? largest[i] : top;
    for (long k = 0; k < padded; k += LANES) {
        vec weight = exponential(*(vec *)(products + k) - top);
        *(vec *)(products + k) = weight;
        sums[k / LANES % PARTS] += weight;
    }
    return total(sums);
}

/* The averages of some queries, in one or two vectors of channels; the last has `own` channels. */
static inline void averages(const float *weights, long padded, const float *sums, const float *values, long pitch,
                            long count, long rows, float *y, const int vectors, long own) {
    vec found[TOGETHER][2] = {0};
    for (long k = 0; k < count; k++)
        for (int j = 0; j < vectors; j++) {
            vec value = got(values + k * pitch + j * LANES, j + 1 < vectors ? LANES : own);
            for (int i = 0; i < TOGETHER; i++) found[i][j] = fused(EACH(weights[i * padded + k]), value, found[i][j]);
        }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++)
            put(y + i * pitch + j * LANES, found[i][j] / sums[i], j + 1 < vectors ? LANES : own);
}

/* One head: `more` has the first key and the first value. */
static void head(const float *queries, const float *const *more, long rows, long count, long pitch, long width,
                 float factor, float *memory, float *y) {
    long padded = up(count, 16) * 16;
    float *products = memory + width * padded, sums[TOGETHER];
    turn_keys(more[0], pitch, count, padded, width, memory);
    for (long row = 0; row < rows; row += TOGETHER) {
        const float *from[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) from[i] = queries + least(row + i, rows - 1) * pitch;
        products_of(from, memory, padded, width, factor, products);
        for (int i = 0; i < TOGETHER; i++) sums[i] = weights_of(products + i * padded, count, padded);
        long held = least(TOGETHER, rows - row), c = 0;
        float *to = y + row * pitch;
        for (; c + 2 * LANES <= width; c += 2 * LANES)
            averages(products, padded, sums, more[1] + c, pitch, count, held, to + c, 2, LANES);
        for (; c < width; c += LANES)
            averages(products, padded, sums, more[1] + c, pitch, count, held, to + c, 1, least(LANES, width - c));
    }
}

/* y[b][q][h] = sum over k of softmax(factor * sum over c of queries[b][q][h][c] * keys[b][k][h][c]) * values[b][k][h]
   numbers: batch, queries, keys, heads, width; arrays: factor; `more` has keys and values. */
int attention(const Call *call, const float *queries, const float *const *more, float *y, int threads) {
    long rows = call->numbers[1], count = call->numbers[2], heads = call->numbers[3], width = call->numbers[4];
    long units = call->numbers[0] * heads, together = least(units, threads), pitch = heads * width;
    long size = (width + TOGETHER) * up(count, 16) * 16;
    float *memory = malloc(sizeof(float) * together * size), factor = *(const float *)call->arrays[0];
    if (!memory) return NO_MEMORY;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long t = 0; t < together; t++)
        for (long unit = units * t / together; unit < units * (t + 1) / together; unit++) {
            long own = unit / heads * rows * pitch + unit % heads * width;
            long other = unit / heads * count * pitch + unit % heads * width;
            const float *both[] = {more[0] + other, more[1] + other};
            head(queries + own, both, rows, count, pitch, width, factor, memory + t * size, y + own);
        }
    free(memory);
    return DONE;
}
