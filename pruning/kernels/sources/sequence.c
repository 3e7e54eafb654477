/* Layers that follow each other, in one call. */
#include "vectors.h"

typedef int Kernel(const Call *call, const void *x, const void *added, void *y, int threads);

/* A tensor: the place of its memory among `memory`, and bytes from there; none if the place is below 0. */
typedef struct {
    int64_t memory, offset;
} Place;

typedef struct {
    Kernel *kernel;
    const Call *call;
    Place x, added, more, y;
} Step;

static char *address(Place place, char *const *memory) {
    return place.memory < 0 ? NULL : memory[place.memory] + place.offset;
}

/* Compute the steps in their order; stop at the first that fails. The last memory, `bytes` of them, is made here. */
int sequence(const Step *steps, int64_t count, char **memory, int64_t last, int64_t bytes, int threads) {
    void *between = NULL;
    if (bytes && posix_memalign(&between, 64, bytes)) return NO_MEMORY;
    memory[last] = between;
    int code = DONE;
    for (const Step *step = steps; step < steps + count && code == DONE; step++) {
        char *x = address(step->x, memory), *y = address(step->y, memory);
        void *both[] = {address(step->added, memory), address(step->more, memory)};
        code = step->kernel(step->call, x, both[1] ? both : both[0], y, threads);
    }
    free(between);
    return code;
}
