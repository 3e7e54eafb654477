/* Linear layers for one example at a time: inputs are looked up in registers.

   16 outputs make a panel, 32 consecutive inputs a chunk. For each chunk, a panel takes the same number of steps; in a
   step, each of its outputs multiplies one weight by one of the 32 inputs, which a permutation of two registers
   fetches. A place is the position in the chunk with bit 7 set, or 0 where an output has no weight left. Weights that
   do not fit into the steps are left over, and follow row by row. An input and a weight are a float, or four bytes. */
#include "four_bytes.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

#define PANEL 16
#define CHUNK 32

/* A missing weight of four bytes is 0, and the byte that it multiplies is finite; a float may not be. */
static inline __m512i step(int bytes, __m512i sum, __m512 lower, __m512 upper, const uint8_t *places,
                           const void *values) {
    __m128i place = _mm_loadu_si128((const __m128i *)places);
    __m512 looked_up = _mm512_permutex2var_ps(lower, _mm512_cvtepu8_epi32(place), upper);
    if (bytes) return (__m512i)plus_bytes((ivec)sum, (ivec)looked_up, *(const ivec *)values);
    return (__m512i)_mm512_mask3_fmadd_ps(looked_up, _mm512_loadu_ps(values), (__m512)sum, _mm_movepi8_mask(place));
}

static inline __m512 sixteen(const float *from, long left) {
    return _mm512_maskz_loadu_ps(left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0, from);
}

static inline __attribute__((always_inline)) void panel_sums(int bytes, long inputs, long steps,
                                                             const uint8_t *places, const float *values,
                                                             const float *x, void *sums) {
    __m512i even = _mm512_setzero_si512(), odd = even;
    for (long start = 0; start < inputs; start += CHUNK) {
        long left = inputs - start, i = 0;
        __m512 lower = sixteen(x + start, left), upper = left > 16 ? sixteen(x + start + 16, left - 16) : lower;
        for (; i + 2 <= steps; i += 2, places += 2 * PANEL, values += 2 * PANEL) {
            even = step(bytes, even, lower, upper, places, values);
            odd = step(bytes, odd, lower, upper, places + PANEL, values + PANEL);
        }
        if (i < steps) {
            even = step(bytes, even, lower, upper, places, values);
            places += PANEL, values += PANEL;
        }
    }
    __m512i both = bytes ? _mm512_add_epi32(even, odd) : (__m512i)_mm512_add_ps((__m512)even, (__m512)odd);
    _mm512_storeu_si512(sums, both);
}

/* numbers: examples, inputs, outputs; arrays: `first` (steps of all panels before a panel, over all chunks), places and
   values of the steps, `order` (the output of each row of the panels), starts, places and values left over, bias. */
int lookup(const Call *call, const float *x, const float *added, float *y, int threads) {
    long examples = call->numbers[0], inputs = call->numbers[1], outputs = call->numbers[2];
    const int32_t *first = call->arrays[0], *order = call->arrays[3];
    const uint8_t *places = call->arrays[1];
    const float *values = call->arrays[2], *left_values = call->arrays[6], *bias = call->arrays[7];
    const int32_t *left_starts = call->arrays[4], *left_places = call->arrays[5];
    long panels = up(outputs, PANEL), chunks = up(inputs, CHUNK);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long unit = 0; unit < examples * panels; unit++) {
        long panel = unit % panels, n = unit / panels;
        const float *from = x + n * inputs;
        float sums[PANEL];
        panel_sums(0, inputs, (first[panel + 1] - first[panel]) / chunks, places + (long)first[panel] * PANEL,
                   values + (long)first[panel] * PANEL, from, sums);
        for (long r = panel * PANEL; r < least(outputs, (panel + 1) * PANEL); r++) {
            float total = sums[r - panel * PANEL];
            for (int32_t i = left_starts[r]; i < left_starts[r + 1]; i++) total += left_values[i] * from[left_places[i]];
            long to = n * outputs + order[r];
            total += bias[order[r]];
            y[to] = clamped(added ? total + added[to] : total, call->low, call->high);
        }
    }
    return DONE;
}

/* The same on bytes: four inputs are an element. The further arrays: first sums, scales, 1 / scale and zero point of
   inputs and of outputs in one array, bias; a further number: whether inputs are bytes already. */
int lookup_int8(const Call *call, const float *x, const float *added, float *y, int threads) {
    long examples = call->numbers[0], inputs = call->numbers[1], outputs = call->numbers[2], fours = up(inputs, 4);
    const int32_t *first = call->arrays[0], *order = call->arrays[3], *first_sums = call->arrays[7];
    const uint8_t *places = call->arrays[1];
    const float *values = call->arrays[2], *scales = call->arrays[8], *bias = call->arrays[10];
    const int32_t *left_starts = call->arrays[4], *left_places = call->arrays[5];
    const int8_t *left_values = call->arrays[6];
    Rounding made = rounding_of((const float *)call->arrays[9] + 2);
    long panels = up(outputs, PANEL), chunks = up(fours, CHUNK), width = made.inverse ? 4 * up(outputs, 4) : outputs;
    uint8_t *own = NULL;
    if (!call->numbers[3]) {
        own = rows_in_bytes(x, examples, inputs, rounding_of(call->arrays[9]), threads);
        if (!own) return NO_MEMORY;
        x = (const float *)(void *)own;
    }
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long unit = 0; unit < examples * panels; unit++) {
        long panel = unit % panels, n = unit / panels, start = panel * PANEL, rows = least(outputs - start, PANEL);
        const uint8_t *from = (const uint8_t *)(x + n * fours);
        int32_t sums[PANEL];
        float found[PANEL];
        panel_sums(1, fours, (first[panel + 1] - first[panel]) / chunks, places + (long)first[panel] * PANEL,
                   values + (long)first[panel] * PANEL, x + n * fours, sums);
        for (long r = 0; r < rows; r++)
            for (long i = 4L * left_starts[start + r]; i < 4L * left_starts[start + r + 1]; i++)
                sums[r] += left_values[i] * from[4L * left_places[i / 4] + i % 4];
        for (long r = 0; r < rows; r++) {
            long o = order[start + r];
            float value = __builtin_fmaf((float)(sums[r] + first_sums[o]), scales[o], bias[o]);
            found[r] = clamped(added ? value + added[n * outputs + o] : value, call->low, call->high);
        }
        uint8_t *bytes = (uint8_t *)y + n * width;
        if (made.inverse) {
            for (long r = 0; r < rows; r++) bytes[order[start + r]] = (uint8_t)byte_of(found[r], made);
            if (!panel) memset(bytes + outputs, 0, width - outputs);
        } else for (long r = 0; r < rows; r++) y[n * width + order[start + r]] = found[r];
    }
    free(own);
    return DONE;
}

int has_lookup(void) { return 1; }
#else
int has_lookup(void) { return 0; }
#endif
