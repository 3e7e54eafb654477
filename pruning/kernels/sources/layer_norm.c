/* Layer normalisation over the last dimension. */
#include "functions.h"

/* y = (x - mean) / sqrt(variance + epsilon) * weight + bias
   numbers: rows, width; arrays: epsilon, weight, bias. */
int layer_norm(const Call *call, const float *x, const float *added, float *y, int threads) {
    long rows = call->numbers[0], width = call->numbers[1];
    (void)added;
    const float *epsilon = call->arrays[0], *weight = call->arrays[1], *bias = call->arrays[2];
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 16)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * width;
        float *to = y + row * width;
        vec sums[PARTS] = {0}, squares[PARTS] = {0};
        for (long i = 0; i < width; i += LANES) sums[i / LANES % PARTS] += got(from + i, least(LANES, width - i));
        float mean = total(sums) / width;
        for (long i = 0; i < width; i += LANES) {
            long count = least(LANES, width - i);
            put(to + i, got(from + i, count) - mean, count);
            vec off = got(to + i, count); /* 0 after the last element */
            squares[i / LANES % PARTS] = fused(off, off, squares[i / LANES % PARTS]);
        }
        float factor = 1.0f / sqrtf(total(squares) / width + *epsilon);
        for (long i = 0; i < width; i += LANES) {
            long count = least(LANES, width - i);
            put(to + i, fused(got(to + i, count) * factor, got(weight + i, count), got(bias + i, count)), count);
        }
    }
    return DONE;
}
