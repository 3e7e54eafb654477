/* Linear layers for one example at a time: each output is the sum over its weights. */
#include "vectors.h"

/* y[n][o] = clamp(bias[o] + sum of values * x[n][places])
   numbers: examples, inputs, outputs; arrays: starts, places, values, bias. */
int rows(const Call *call, const float *x, const float *added, float *y, int threads) {
    long examples = call->numbers[0], inputs = call->numbers[1], outputs = call->numbers[2];
    const int32_t *starts = call->arrays[0], *places = call->arrays[1];
    const float *values = call->arrays[2], *bias = call->arrays[3];
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long unit = 0; unit < examples * outputs; unit++) {
        long o = unit % outputs;
        const float *from = x + unit / outputs * inputs;
        eight sum = {0};
        float total = bias[o];
        int32_t i = starts[o], end = starts[o + 1];
        for (; i + 8 <= end; i += 8) { /* eight single loads: faster than a gather instruction on many processors */
            const int32_t *p = places + i;
            eight read = {from[p[0]], from[p[1]], from[p[2]], from[p[3]], from[p[4]], from[p[5]], from[p[6]], from[p[7]]};
            sum += *(const eight *)(values + i) * read;
        }
        for (; i < end; i++) total += values[i] * from[places[i]];
        for (int s = 0; s < 8; s++) total += sum[s];
        y[unit] = clamped(added ? total + added[unit] : total, call->low, call->high);
    }
    return DONE;
}
