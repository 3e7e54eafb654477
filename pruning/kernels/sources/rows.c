/* Linear layers for one example at a time: each output is the sum over its weights. */
#include "vectors.h"

#define AT_ONCE 8

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
        float sum[AT_ONCE] = {0}, total = bias[o];
        int32_t i = starts[o], end = starts[o + 1];
        for (; i + AT_ONCE <= end; i += AT_ONCE)
            for (int s = 0; s < AT_ONCE; s++) sum[s] += values[i + s] * from[places[i + s]];
        for (; i < end; i++) total += values[i] * from[places[i]];
        for (int s = 0; s < AT_ONCE; s++) total += sum[s];
        y[unit] = clamped(added ? total + added[unit] : total, call->low, call->high);
    }
    return DONE;
}
