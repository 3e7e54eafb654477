/* Groups of outputs: in tiles of registers where the processor has them, else in vectors. */
#include "groups.h"

#define MOST_TILES 4 /* vectors whose sums stay in registers */

static void vector_products(const int32_t *starts, const int32_t *places, int shift, const int32_t *values,
                            const int32_t *inputs, int32_t *sums, long pitch) {
    for (long r = 0; r < GROUP; r++) {
        ivec sum = {0};
        for (int32_t i = starts[0]; i < starts[1]; i++) {
            int32_t value = values[(long)i / GROUP * SIXTEEN + r * GROUP + i % GROUP];
            sum = plus_bytes(sum, *(const ivec *)(inputs + ((long)places[i] << shift)), value - (ivec){0});
        }
        *(ivec *)(sums + r * pitch) = sum;
    }
}

#if defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512F__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define ASK_FOR_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define STATE_OF_TILES 18

/* Linux lets a process use the tiles after it asked once; its children may use them too. It refuses if a thread handles
   signals on a stack that cannot hold the tiles. Two threads that ask at the same time get the same answer. */
int has_tiles(void) {
    static int answer; /* 0: not asked yet, 1: allowed, 2: refused */
    int found = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (!found) {
        found = syscall(SYS_arch_prctl, ASK_FOR_STATE, STATE_OF_TILES) ? 2 : 1;
        __atomic_store_n(&answer, found, __ATOMIC_RELAXED);
    }
    return found == 1;
}

/* Tiles of 16 rows of 64 bytes: 0 to 3 sums, 4 weights, 5 to 7 inputs. */
static void configure(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.bytes[i] = 4 * GROUP, tiles.rows[i] = GROUP;
    _tile_loadconfig(&tiles);
}

#define MEMORY_IS_READ __asm__ volatile("" ::: "memory") /* the compiler does not know that tiles are read from it */

/* Copy the inputs of sixteen blocks, a tile for each vector. */
static inline __attribute__((always_inline)) void gather(const int32_t *places, int shift, const int32_t *inputs,
                                                         int vectors, int32_t *to) {
    for (long k = 0; k < GROUP; k++)
        for (long v = 0; v < vectors; v++)
            _mm512_store_si512(to + v * SIXTEEN + k * GROUP,
                               _mm512_loadu_si512(inputs + ((long)places[k] << shift) + v * GROUP));
}

/* The inputs of the next sixteen blocks are copied before the products of these, which so wait for no store. */
#define TILE_PRODUCTS(V)                                                                                              \
    static void tile_products_##V(const int32_t *starts, const int32_t *places, int shift, const int32_t *values,    \
                                  const int32_t *inputs, int32_t *sums, long pitch) {                                 \
        int32_t copies[2][V * SIXTEEN] __attribute__((aligned(64)));                                                  \
        long from = starts[0] / GROUP, to = starts[1] / GROUP;                                                        \
        _tile_zero(0);                                                                                                \
        if (V > 1) _tile_zero(1);                                                                                     \
        if (V > 2) _tile_zero(2);                                                                                     \
        if (V > 3) _tile_zero(3);                                                                                     \
        if (from < to) gather(places + from * GROUP, shift, inputs, V, copies[from % 2]);                             \
        for (long t = from; t < to; t++) {                                                                            \
            const int32_t *own = copies[t % 2];                                                                       \
            if (t + 1 < to) gather(places + (t + 1) * GROUP, shift, inputs, V, copies[(t + 1) % 2]);                  \
            MEMORY_IS_READ;                                                                                           \
            _tile_loadd(4, values + t * SIXTEEN, 4 * GROUP);                                                          \
            _tile_loadd(5, own, 4 * GROUP);                                                                           \
            _tile_dpbsud(0, 4, 5);                                                                                    \
            if (V > 1) { _tile_loadd(6, own + SIXTEEN, 4 * GROUP); _tile_dpbsud(1, 4, 6); }                           \
            if (V > 2) { _tile_loadd(7, own + 2 * SIXTEEN, 4 * GROUP); _tile_dpbsud(2, 4, 7); }                       \
            if (V > 3) { _tile_loadd(5, own + 3 * SIXTEEN, 4 * GROUP); _tile_dpbsud(3, 4, 5); }                       \
            MEMORY_IS_READ;                                                                                           \
        }                                                                                                             \
        _tile_stored(0, sums, 4 * pitch);                                                                             \
        if (V > 1) _tile_stored(1, sums + GROUP, 4 * pitch);                                                          \
        if (V > 2) _tile_stored(2, sums + 2 * GROUP, 4 * pitch);                                                      \
        if (V > 3) _tile_stored(3, sums + 3 * GROUP, 4 * pitch);                                                      \
        MEMORY_IS_READ;                                                                                               \
    }
TILE_PRODUCTS(1)
TILE_PRODUCTS(2)
TILE_PRODUCTS(3)
TILE_PRODUCTS(4)
typedef void TileProducts(const int32_t *, const int32_t *, int, const int32_t *, const int32_t *, int32_t *, long);
static TileProducts *const tile_products[MOST_TILES + 1] = {
    NULL, tile_products_1, tile_products_2, tile_products_3, tile_products_4,
};

static void sums_in_tiles(long rows, int vectors, const int32_t *starts, const int32_t *places, int shift,
                          const int32_t *values, const int32_t *inputs, int32_t *sums) {
    configure();
    for (long g = 0; g * GROUP < rows; g++)
        for (long v = 0; v < vectors; v += MOST_TILES)
            tile_products[least(MOST_TILES, vectors - v)](starts + g, places, shift, values, inputs + v * LANES,
                                                          sums + (g * GROUP * vectors + v) * LANES, vectors * LANES);
    _tile_release();
}
#else
int has_tiles(void) { return 0; }
#endif

void group_sums(long rows, int vectors, const int32_t *starts, const int32_t *places, int shift, const int32_t *values,
                const int32_t *inputs, int32_t *sums) {
#if defined(ASK_FOR_STATE)
    if (has_tiles()) {
        sums_in_tiles(rows, vectors, starts, places, shift, values, inputs, sums);
        return;
    }
#endif
    for (long g = 0; g * GROUP < rows; g++)
        for (long v = 0; v < vectors; v++)
            vector_products(starts + g, places, shift, values, inputs + v * LANES,
                            sums + (g * GROUP * vectors + v) * LANES, vectors * LANES);
}
