/* Linear layers over several examples: inputs transposed tile by tile, then each weight times a tile of examples. */
#include "broadcast.h"

static void turn_4x4(const float *from, long from_pitch, float *to, long to_pitch) {
    four a = *(const four *)from, b = *(const four *)(from + from_pitch);
    four c = *(const four *)(from + 2 * from_pitch), d = *(const four *)(from + 3 * from_pitch);
    four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), AB = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    *(four *)to = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    *(four *)(to + to_pitch) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    *(four *)(to + 2 * to_pitch) = __builtin_shufflevector(AB, CD, 0, 1, 4, 5);
    *(four *)(to + 3 * to_pitch) = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
}

/* to[c][r] = from[r][c] */
static void transpose(const float *from, long from_pitch, float *to, long to_pitch, long rows, long columns) {
    long c = 0;
    for (; c + 4 <= columns; c += 4) {
        long r = 0;
        for (; r + 4 <= rows; r += 4) turn_4x4(from + r * from_pitch + c, from_pitch, to + c * to_pitch + r, to_pitch);
        for (; r < rows; r++)
            for (long i = 0; i < 4; i++) to[(c + i) * to_pitch + r] = from[r * from_pitch + c + i];
    }
    for (; c < columns; c++)
        for (long r = 0; r < rows; r++) to[c * to_pitch + r] = from[r * from_pitch + c];
}

/* Tile `tile` of `tiles`: its first vector of examples; tiles differ by at most one vector. */
static long tile_start(long vectors, long tile, long tiles) { return vectors * tile / tiles; }

#define INPUTS_AT_ONCE 64

/* y[n][o] = clamp(bias[o] + sum of values * x[n][places]); `doublings`: a tile has up to 2^doublings vectors. */
int columns(long examples, long inputs, long outputs, long blocks, long doublings, const int32_t *starts,
            const int32_t *places, const float *values, const float *bias, float low, float high, const float *x,
            float *y, int threads) {
    long vectors = up(examples, LANES), tiles = up(vectors, 1L << doublings), pitch = LANES << doublings;
    long chunks = up(outputs, ROWS_AT_ONCE), parts = up(inputs, INPUTS_AT_ONCE), together = least(tiles, threads);
    int shift = __builtin_ctzl(pitch);
    float *turned = malloc(sizeof(float) * together * inputs * pitch);
    if (!turned) return NO_MEMORY;
    for (long tile = 0; tile < tiles; tile += together) {
        long now = least(together, tiles - tile);
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (long unit = 0; unit < now * parts; unit++) {
            long t = unit / parts, k = unit % parts * INPUTS_AT_ONCE, width = least(INPUTS_AT_ONCE, inputs - k);
            long n = tile_start(vectors, tile + t, tiles) * LANES;
            long end = tile_start(vectors, tile + t + 1, tiles) * LANES, held = least(end, examples) - n;
            float *to = turned + (t * inputs + k) * pitch;
            transpose(x + n * inputs + k, inputs, to, pitch, held, width);
            if (held < end - n)
                for (long i = 0; i < width; i++) memset(to + i * pitch + held, 0, sizeof(float) * (end - n - held));
        }
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (long unit = 0; unit < now * chunks; unit++) {
            long t = unit / chunks, first = unit % chunks * ROWS_AT_ONCE, rows = least(ROWS_AT_ONCE, outputs - first);
            long v = tile_start(vectors, tile + t, tiles), wide = tile_start(vectors, tile + t + 1, tiles) - v;
            float sums[SUMS];
            tile_sums(first, rows, outputs, blocks, (int)wide, starts, places, shift, values,
                      turned + t * inputs * pitch, bias, sums);
            for (long i = 0; i < rows * wide * LANES; i++) sums[i] = clamped(sums[i], low, high);
            transpose(sums, wide * LANES, y + v * LANES * outputs + first, outputs, rows,
                      least(wide * LANES, examples - v * LANES));
        }
    }
    free(turned);
    return DONE;
}
