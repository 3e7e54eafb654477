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
        vec sums[PARTS] = {0}, rest[PARTS] = {0}, squares[PARTS] = {0};
        for (long i = 0; i < width; i += LANES) sums[i / LANES % PARTS] += got(from + i, least(LANES, width - i));
        float mean = total(sums) / width;
        for (long i = 0; i < width; i += LANES) {
            long count = least(LANES, width - i);
            put(to + i, got(from + i, count) - mean, count);
            vec off = got(to + i, count); /* 0 after the last element */
            rest[i / LANES % PARTS] += off;
            squares[i / LANES % PARTS] = fused(off, off, squares[i / LANES % PARTS]);
        }
        float more = total(rest) / width; /* the mean was rounded */
        float variance = __builtin_fmaf(-more, more, total(squares) / width);
        float factor = 1.0f / sqrtf((variance > 0 ? variance : variance * 0) + *epsilon);
        for (long i = 0; i < width; i += LANES) {
            long count = least(LANES, width - i);
            vec x = (got(to + i, count) - more) * factor;
            put(to + i, fused(x, got(weight + i, count), got(bias + i, count)), count);
        }
    }
    return DONE;
}
