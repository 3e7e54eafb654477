/* Linear layers over several examples: inputs transposed tile by tile, then each weight times a tile of examples. */
#include "broadcast.h"

#define PAIRS(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define LATER_PAIRS(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define FOURS(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define LATER_FOURS(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define EIGHT(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define LATER_EIGHT(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15)

static void turn_8x8(const float *from, long from_pitch, float *to, long to_pitch) {
    eight row[8], pair[8], four[8];
    for (int i = 0; i < 8; i++) row[i] = *(const eight *)(from + i * from_pitch);
    for (int i = 0; i < 8; i += 2) pair[i] = PAIRS(row[i], row[i + 1]), pair[i + 1] = LATER_PAIRS(row[i], row[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = FOURS(pair[i + j], pair[i + 2 + j]);
            four[i + 2 * j + 1] = LATER_FOURS(pair[i + j], pair[i + 2 + j]);
        }
    for (int i = 0; i < 4; i++) {
        *(eight *)(to + i * to_pitch) = EIGHT(four[i], four[i + 4]);
        *(eight *)(to + (i + 4) * to_pitch) = LATER_EIGHT(four[i], four[i + 4]);
    }
}

/* to[c][r] = from[r][c]. 16 columns at once, so that a cache line of each row is read whole before it may be lost: rows
   that lie a power of two apart share a set of the cache. */
static void transpose(const float *from, long from_pitch, float *to, long to_pitch, long rows, long columns) {
    long whole = rows / 8 * 8;
    for (long c = 0; c < columns; c += 16) {
        long end = least(columns, c + 16);
        for (long r = 0; r < whole; r += 8) {
            long i = c;
            for (; i + 8 <= end; i += 8)
                turn_8x8(from + r * from_pitch + i, from_pitch, to + i * to_pitch + r, to_pitch);
            for (; i < end; i++)
                for (long j = r; j < r + 8; j++) to[i * to_pitch + j] = from[j * from_pitch + i];
        }
        for (long r = whole; r < rows; r++)
            for (long i = c; i < end; i++) to[i * to_pitch + r] = from[r * from_pitch + i];
    }
}

/* Tile `tile` of `tiles`: its first vector of examples; tiles differ by at most one vector. */
static long tile_start(long vectors, long tile, long tiles) { return vectors * tile / tiles; }

#define INPUTS_AT_ONCE 64

/* y[n][o] = clamp(sum of values * x[n][places]), for elements of four bytes; outputs become bytes with `made`
   numbers: examples, inputs, outputs, blocks, doublings (a tile has up to 2^doublings vectors); arrays: starts, places,
   values. */
static int tiles_of(const Call *call, const float *x, long inputs, const Terms *terms, const float *added,
                    const Rounding *made, float *y, int threads) {
    long examples = call->numbers[0], outputs = call->numbers[2];
    long blocks = call->numbers[3], doublings = call->numbers[4];
    const int32_t *starts = call->arrays[0], *places = call->arrays[1];
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
            tile_sums(first, rows, outputs, blocks, (int)wide, starts, places, shift, terms,
                      turned + t * inputs * pitch, sums);
            long n = v * LANES, held = least(wide * LANES, examples - n);
            if (added && made)
                for (long r = 0; r < rows; r++)
                    for (long i = 0; i < held; i++) sums[r * wide * LANES + i] += added[(n + i) * outputs + first + r];
            long columns_out = made ? up(outputs, 4) : outputs, step = made ? 4 : 1;
            if (made) join_rows(sums, rows, wide * LANES, call->low, call->high, *made);
            else if (!added)
                for (long i = 0; i < rows * wide * LANES; i++) sums[i] = clamped(sums[i], call->low, call->high);
            transpose(sums, wide * LANES, y + n * columns_out + first / step, columns_out, up(rows, step), held);
            if (added && !made) /* by example, in which outputs are consecutive */
                for (long i = n * outputs + first; i < (n + held) * outputs; i += outputs)
                    for (long r = i; r < i + rows; r++) y[r] = clamped(y[r] + added[r], call->low, call->high);
        }
    }
    free(turned);
    return DONE;
}

/* y[n][o] = clamp(bias[o] + sum of values * x[n][places]); the last array is the bias. */
int columns(const Call *call, const float *x, const float *added, float *y, int threads) {
    Terms terms = float_terms(call->arrays[2], call->arrays[3]);
    return tiles_of(call, x, call->numbers[1], &terms, added, NULL, y, threads);
}

/* The same on bytes: four inputs are an element. The further arrays: first sums, scales, 1 / scale and zero point of
   inputs and of outputs in one array, bias; further numbers: whether inputs are bytes already, and how many outputs share
   blocks (see groups.h). */
int columns_int8(const Call *call, const float *x, const float *added, float *y, int threads) {
    long examples = call->numbers[0], inputs = call->numbers[1], fours = up(inputs, 4);
    const float *roundings = call->arrays[5];
    Terms terms = byte_terms(call->numbers[6], call->arrays[2], call->arrays[3], call->arrays[4], call->arrays[6]);
    Rounding rounding = rounding_of(roundings), made = rounding_of(roundings + 2);
    uint8_t *bytes = NULL;
    if (!call->numbers[5]) {
        bytes = rows_in_bytes(x, examples, inputs, rounding, threads);
        if (!bytes) return NO_MEMORY;
        x = (const float *)(void *)bytes;
    }
    int code = tiles_of(call, x, fours, &terms, added, made.inverse ? &made : NULL, y, threads);
    free(bytes);
    return code;
}
