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
    __asm__ volatile("" : : "r"(&tiles) : "memory"); /* the compiler sees only its first eight bytes read */
    _tile_loadconfig(&tiles);
}

#define MEMORY_IS_READ __asm__ volatile("" ::: "memory") /* the compiler does not know that tiles are read from it */

/* A column of products: up to MOST_TILES vectors of inputs with a group of outputs. */
typedef struct { long from, to; int vectors; const int32_t *inputs; } Column;

static inline Column column_of(long number, long columns, int vectors, const int32_t *starts, const int32_t *inputs) {
    long g = number / columns, v = number % columns * MOST_TILES;
    return (Column){starts[g] / GROUP, starts[g + 1] / GROUP, (int)least(MOST_TILES, vectors - v), inputs + v * LANES};
}

/* Copy the inputs of sixteen blocks, a tile for each vector. */
static inline void gather(const int32_t *places, int shift, Column column, int32_t *to) {
    for (long k = 0; k < GROUP; k++) {
        const int32_t *from = column.inputs + ((long)places[k] << shift);
        for (long v = 0; v < column.vectors; v++)
            _mm512_store_si512(to + v * SIXTEEN + k * GROUP, _mm512_loadu_si512(from + v * GROUP));
    }
}

static inline void gather_first(const int32_t *places, int shift, Column column, int32_t *to) {
    if (column.from < column.to) gather(places + column.from * GROUP, shift, column, to);
}

/* The inputs of the next sixteen blocks, of this column or of the next, are copied before the products of these, which
   so wait for no store. */
static void sums_in_tiles(long rows, int vectors, const int32_t *starts, const int32_t *places, int shift,
                          const int32_t *values, const int32_t *inputs, int32_t *sums) {
    int32_t copies[2][MOST_TILES * SIXTEEN] __attribute__((aligned(64)));
    long columns = up(vectors, MOST_TILES), all = up(rows, GROUP) * columns, turn = 0, pitch = vectors * LANES;
    Column next = column_of(0, columns, vectors, starts, inputs);
    configure();
    gather_first(places, shift, next, copies[turn]);
    for (long number = 0; number < all; number++) {
        Column own = next;
        next = number + 1 < all ? column_of(number + 1, columns, vectors, starts, inputs) : (Column){0};
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (long t = own.from; t < own.to; t++, turn = !turn) {
            const int32_t *held = copies[turn];
            if (t + 1 < own.to) gather(places + (t + 1) * GROUP, shift, own, copies[!turn]);
            else gather_first(places, shift, next, copies[!turn]);
            MEMORY_IS_READ;
            _tile_loadd(4, values + t * SIXTEEN, 4 * GROUP);
            _tile_loadd(5, held, 4 * GROUP);
            _tile_dpbsud(0, 4, 5);
            if (own.vectors > 1) { _tile_loadd(6, held + SIXTEEN, 4 * GROUP); _tile_dpbsud(1, 4, 6); }
            if (own.vectors > 2) { _tile_loadd(7, held + 2 * SIXTEEN, 4 * GROUP); _tile_dpbsud(2, 4, 7); }
            if (own.vectors > 3) { _tile_loadd(5, held + 3 * SIXTEEN, 4 * GROUP); _tile_dpbsud(3, 4, 5); }
            MEMORY_IS_READ;
        }
        if (own.from == own.to) gather_first(places, shift, next, copies[turn]);
        int32_t *to = sums + number / columns * GROUP * pitch + number % columns * MOST_TILES * LANES;
        _tile_stored(0, to, 4 * pitch);
        if (own.vectors > 1) _tile_stored(1, to + GROUP, 4 * pitch);
        if (own.vectors > 2) _tile_stored(2, to + 2 * GROUP, 4 * pitch);
        if (own.vectors > 3) _tile_stored(3, to + 3 * GROUP, 4 * pitch);
        MEMORY_IS_READ;
    }
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
