/* Linear layers for one example at a time: inputs are looked up in registers.

   16 outputs make a panel, 32 consecutive inputs a chunk. For each chunk, a panel takes the same number of steps; in a
   step, each of its outputs multiplies one weight by one of the 32 inputs, which a permutation of two registers
   fetches. A place is the position in the chunk with bit 7 set, or 0 where an output has no weight left. Weights that
   do not fit into the steps are left over, and follow row by row. */
#include "vectors.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

#define PANEL 16
#define CHUNK 32

static inline __m512 step(__m512 sum, __m512 lower, __m512 upper, const uint8_t *places, const float *values) {
    __m128i place = _mm_loadu_si128((const __m128i *)places);
    __m512 looked_up = _mm512_permutex2var_ps(lower, _mm512_cvtepu8_epi32(place), upper);
    return _mm512_mask3_fmadd_ps(looked_up, _mm512_loadu_ps(values), sum, _mm_movepi8_mask(place));
}

static inline __m512 sixteen(const float *from, long left) {
    return _mm512_maskz_loadu_ps(left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0, from);
}

static void panel_sums(long inputs, long steps, const uint8_t *places, const float *values, const float *x,
                       float *sums) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (long start = 0; start < inputs; start += CHUNK) {
        long left = inputs - start, i = 0;
        __m512 lower = sixteen(x + start, left), upper = left > 16 ? sixteen(x + start + 16, left - 16) : lower;
        for (; i + 2 <= steps; i += 2, places += 2 * PANEL, values += 2 * PANEL) {
            even = step(even, lower, upper, places, values);
            odd = step(odd, lower, upper, places + PANEL, values + PANEL);
        }
        if (i < steps) {
            even = step(even, lower, upper, places, values);
            places += PANEL, values += PANEL;
        }
    }
    _mm512_storeu_ps(sums, _mm512_add_ps(even, odd));
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
        panel_sums(inputs, (first[panel + 1] - first[panel]) / chunks, places + (long)first[panel] * PANEL,
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

int has_lookup(void) { return 1; }
#else
int has_lookup(void) { return 0; }
#endif
