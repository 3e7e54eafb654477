/* Convolutions: each weight times tiles of consecutive pixels of zero-padded planes.

   An input channel becomes one plane for each phase of the strides that a weight reads. The rows of a plane lie one
   after another, and the zeros on the left of a row are those on the right of the row before. So a weight reads, for
   consecutive outputs, consecutive pixels: those of its plane, moved down and right by its place in the kernel. Where a
   tile runs over the end of a row of outputs, it computes pixels that are not stored. */
#include "broadcast.h"

typedef struct {
    int64_t examples, channels, height, width;                    /* input */
    int64_t outputs, out_height, out_width;                       /* output */
    int64_t stride_down, stride_right, pad_top, pad_left;
    int64_t farthest_down, farthest_right;                        /* of all weights, in pixels of a plane */
    int64_t phases, blocks, vectors;
    int64_t phase_down[16], phase_right[16];
} Geometry;

typedef struct {
    long images, row, image, plane;   /* images at once; pixels of a row, an image and a plane */
    long segments, segment, pixels;   /* tiles begin anew in each segment, and cover `pixels` of it */
} Layout;

/* Up to LANES elements of a tile from `start`: outputs of an image in a row of it, in its first plane the element `to` of
   y and `from` of what is added. */
typedef struct { long start, count, to, from; } Piece;

/* Steps after the sums: a tensor to add, in floats or in bytes, and the rounding of outputs. */
typedef struct {
    const float *added;    /* NULL: nothing is added */
    int adds_bytes, zero;
    float scale;           /* bytes are added as (byte - zero) * scale */
    Rounding made;         /* its inverse is 0: outputs are floats */
    float low, high;
} Ends;

#define PLANES_BYTES (1 << 19)
#define MOST_PIECES (MOST_VECTORS * LANES) /* each has a pixel */

static long zeros_left(const Geometry *g, long f) {
    return up(most(0, g->pad_left - g->phase_right[f]), g->stride_right);
}

static long held_right(const Geometry *g, long f) {
    long end = up(most(0, g->pad_left + g->width - g->phase_right[f]), g->stride_right);
    return least(end, g->out_width + g->farthest_right) - zeros_left(g, f);
}

static Layout layout_of(const Geometry *g) {
    Layout l = {0};
    l.row = g->out_width;
    for (long f = 0; f < g->phases; f++) {
        l.row = most(l.row, zeros_left(g, f) + held_right(g, f));
        l.row = most(l.row, g->out_width + g->farthest_right - zeros_left(g, f));
    }
    l.image = (g->out_height + g->farthest_down) * l.row;
    l.images = least(g->examples, most(1, PLANES_BYTES / (4 * g->channels * g->phases * l.image)));
    long alone = (g->out_height - 1) * l.row + g->out_width, together = (l.images - 1) * l.image + alone;
    int anew = l.images * up(alone, LANES) <= up(together, LANES);
    l.segments = anew ? l.images : 1, l.segment = l.image, l.pixels = anew ? alone : together;
    l.plane = (l.segments - 1) * l.segment + up(l.pixels, LANES) * LANES;
    l.plane = up(l.plane + g->farthest_down * l.row + g->farthest_right, LANES);
    l.plane = most(l.plane, up(l.images * l.image, LANES));
    l.plane = (l.plane | 1) * LANES; /* an odd number of vectors: planes spread over the sets of the cache */
    return l;
}

static void copy_even(float *to, const float *from, long count) {
    long i = 0;
    for (; i + 4 < count; i += 4) {
        four a = *(const four *)(from + 2 * i), b = *(const four *)(from + 2 * i + 4);
        *(four *)(to + i) = __builtin_shufflevector(a, b, 0, 2, 4, 6);
    }
    for (; i < count; i++) to[i] = from[2 * i];
}

static void fill_plane(const Geometry *g, const Layout *l, const float *x, long images, long f, int zero,
                       float *plane) {
    long left = zeros_left(g, f), count = held_right(g, f), image_size = g->channels * g->height * g->width;
    long skipped = left * g->stride_right + g->phase_right[f] - g->pad_left;
    if (g->stride_right == 1 && g->stride_down == 1 && count == g->width && l->row == g->width && !g->pad_top &&
        g->out_height + g->farthest_down == g->height) {
        for (long n = 0; n < images; n++) copy(plane + n * l->image, x + n * image_size, l->image);
        memset(plane + images * l->image, zero, sizeof(float) * (l->plane - images * l->image));
        return;
    }
    memset(plane, zero, sizeof(float) * l->plane);
    for (long n = 0; n < images; n++)
        for (long i = 0; i < g->out_height + g->farthest_down; i++) {
            long h = i * g->stride_down + g->phase_down[f] - g->pad_top;
            if (h < 0 || h >= g->height) continue;
            const float *from = x + n * image_size + h * g->width + skipped;
            float *to = plane + n * l->image + i * l->row + left;
            if (g->stride_right == 1) copy(to, from, count);
            else if (g->stride_right == 2) copy_even(to, from, count);
            else for (long j = 0; j < count; j++) to[j] = from[j * g->stride_right];
        }
}

/* The parts of a tile that are pixels of the output; returns their number. `to` and `from`: planes of an image of y and
   of what is added. */
static long pieces_of(const Geometry *g, const Layout *l, long start, long count, long images, long to, long from,
                      Piece *pieces) {
    long found = 0, size = g->out_height * g->out_width, gapless = l->row == g->out_width; /* one long row */
    long row = gapless ? size : l->row, width = gapless ? size : g->out_width, height = size / width;
    for (long pixel = start; pixel < start + count;) {
        long n = pixel / l->image, h = pixel % l->image / row, w = pixel % l->image % row;
        if (n >= images) break;
        if (h >= height) pixel = (n + 1) * l->image;
        else if (w >= width) pixel += row - w;
        else
            for (long end = least(pixel - w + width, start + count); pixel < end;) {
                long held = least(LANES, end - pixel), own = h * width + w;
                pieces[found++] = (Piece){pixel - start, held, n * to * size + own, n * from * size + own};
                pixel += held, w += held;
            }
    }
    return found;
}

/* The sums of a piece with what is added, clamped. All is passed by value: a store of vectors might change memory. */
static inline vec ended(Ends ends, Piece piece, const float *sums, const float *added, int shift) {
    vec value = *(const vec *)(sums + piece.start);
    if (ends.adds_bytes) {
        ivec byte = (ivec)got(added + piece.from, piece.count) >> shift & 255;
        value = fused(__builtin_convertvector(byte - ends.zero, vec), ends.scale - (vec){0}, value);
    } else if (added) value += got(added + piece.from, piece.count);
    return clamped_vector(value, ends.low, ends.high);
}

static inline const float *plane_of(Ends ends, long output, long size) {
    return ends.added ? ends.added + (ends.adds_bytes ? output / 4 : output) * size : NULL;
}

static void store(long size, const Piece *pieces, long found, long first, long rows, long pitch, const float *sums,
                  Ends ends, float *y) {
    for (long output = first; output < first + rows; output++, sums += pitch) {
        const float *added = plane_of(ends, output, size);
        for (long i = 0; i < found; i++) {
            Piece piece = pieces[i];
            put(y + output * size + piece.to, ended(ends, piece, sums, added, 8 * (int)(output % 4)), piece.count);
        }
    }
}

static void store_bytes(long size, const Piece *pieces, long found, long first, long rows, long pitch,
                        const float *sums, Ends ends, float *y) {
    for (long output = first; output < first + rows; output += 4, sums += 4 * pitch)
        for (long i = 0; i < found; i++) {
            Piece piece = pieces[i];
            ivec four = {0};
            for (long k = 0; k < least(4, first + rows - output); k++) {
                vec value = ended(ends, piece, sums + k * pitch, plane_of(ends, output + k, size), 8 * (int)k);
                four |= bytes_of(value, ends.made) << 8 * (int)k;
            }
            put(y + output / 4 * size + piece.to, (vec)four, piece.count);
        }
}

/* y = clamp(added + convolution of x with the weights), for elements of four bytes; each byte of padding is `zero`
   arrays: geometry, starts, planes, down, right, values. A weight of plane p (channel * phases + phase), moved by down
   and right, reads pixel p * plane + down * row + right. */
static int convolve(const Call *call, const float *x, int zero, const Terms *terms, Ends ends, float *y, int threads) {
    const int32_t *starts = call->arrays[1], *planes = call->arrays[2];
    const int16_t *down = call->arrays[3], *right = call->arrays[4];
    Geometry g;
    memcpy(&g, call->arrays[0], sizeof g);
    Layout l = layout_of(&g);
    long count = starts[started(terms, g.outputs, g.blocks)], all = g.channels * g.phases;
    long chunks = up(g.outputs, ROWS_AT_ONCE);
    long vectors = up(l.pixels, LANES), tiles = up(vectors, g.vectors);
    long size = g.out_height * g.out_width, fours = up(g.outputs, 4);
    long planes_made = ends.made.inverse ? fours : g.outputs, planes_added = ends.adds_bytes ? fours : g.outputs;
    if (all * l.plane > INT32_MAX) return TOO_LARGE;
    float *held = aligned_alloc(64, 64 * up(sizeof(float) * all * l.plane, 64)); /* a line of the cache */
    int32_t *places = malloc(sizeof(int32_t) * most(1, count));
    if (!held || !places) return free(held), free(places), NO_MEMORY;
    for (long i = 0; i < count; i++) places[i] = planes[i] * (int32_t)l.plane + down[i] * (int32_t)l.row + right[i];
    for (long n = 0; n < g.examples; n += l.images) {
        long images = least(l.images, g.examples - n), segments = l.segments > 1 ? images : 1;
        const float *from = x + n * g.channels * g.height * g.width;
        Ends own = ends;
        if (ends.added) own.added += n * planes_added * size;
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (long p = 0; p < all; p++)
            fill_plane(&g, &l, from + p / g.phases * g.height * g.width, images, p % g.phases, zero,
                       held + p * l.plane);
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (long unit = 0; unit < segments * tiles * chunks; unit++) {
            long tile = unit / chunks % tiles, first = unit % chunks * ROWS_AT_ONCE;
            long v = vectors * tile / tiles, wide = vectors * (tile + 1) / tiles - v, pitch = wide * LANES;
            long start = unit / chunks / tiles * l.segment + v * LANES, rows = least(ROWS_AT_ONCE, g.outputs - first);
            float sums[SUMS + LANES]; /* the last piece is read as a whole vector */
            Piece pieces[MOST_PIECES];
            long count = least(pitch, l.pixels - v * LANES);
            long found = pieces_of(&g, &l, start, count, images, planes_made, planes_added, pieces);
            tile_sums(first, rows, g.outputs, g.blocks, (int)wide, starts, places, 0, terms, held + start, sums);
            (ends.made.inverse ? store_bytes : store)(size, pieces, found, first, rows, pitch, sums, own,
                                                      y + n * planes_made * size);
        }
    }
    free(held), free(places);
    return DONE;
}

/* The last array is the bias. */
int pixels(const Call *call, const float *x, const float *added, float *y, int threads) {
    Terms terms = float_terms(call->arrays[5], call->arrays[6]);
    return convolve(call, x, 0, &terms, (Ends){.added = added, .low = call->low, .high = call->high}, y, threads);
}

/* The same on bytes: a channel of the geometry is up to four channels of a group. The further arrays: first sums,
   scales, 1 / scale and zero point of inputs and of outputs and scale and zero point of what is added in one array,
   bias; numbers: channels of a group, groups, whether inputs are bytes already, and how many outputs share blocks (see
   groups.h). */
int pixels_int8(const Call *call, const float *x, const float *added, float *y, int threads) {
    long channels = call->numbers[0], groups = call->numbers[1], fours = up(channels, 4);
    const float *roundings = call->arrays[8];
    Terms terms = byte_terms(call->numbers[3], call->arrays[5], call->arrays[6], call->arrays[7], call->arrays[9]);
    Rounding rounding = rounding_of(roundings), made = rounding_of(roundings + 2);
    Ends ends = {added, added && roundings[4], (int)roundings[5], roundings[4], made, call->low, call->high};
    if (call->numbers[2]) return convolve(call, x, rounding.zero, &terms, ends, y, threads);
    Geometry g;
    memcpy(&g, call->arrays[0], sizeof g);
    long size = g.height * g.width, planes = g.examples * groups * fours;
    uint32_t *bytes = malloc(sizeof(uint32_t) * most(1, planes * size));
    if (!bytes) return NO_MEMORY;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long p = 0; p < planes; p++) {
        long first = p % fours * 4, held = least(4, channels - first);
        const float *from = x + (p / fours * channels + first) * size;
        uint32_t *to = bytes + p * size;
        for (long i = 0; size >= LANES && i < size; i += LANES) {
            long at = least(i, size - LANES); /* the last vector overlaps the one before */
            *(vec *)(to + at) = joined(from, held, size, at, -INFINITY, INFINITY, rounding);
        }
        for (long i = 0; size < LANES && i < size; i++) {
            to[i] = 0;
            for (long c = 0; c < held; c++) to[i] |= byte_of(from[c * size + i], rounding) << 8 * c;
        }
    }
    int code = convolve(call, (const float *)(void *)bytes, rounding.zero, &terms, ends, y, threads);
    free(bytes);
    return code;
}
