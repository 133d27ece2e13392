/* Mixtures of experts: rows are divided into tiles, each of one expert, and multiplied by that
   expert's rows of a weight (`triforce_kernels.experts`). */
#include <stddef.h>

#include "host.h"
#include "threads.h"

/* A product of tiles of `size` rows. Tile t is of expert experts[t], or of none if that is negative,
   and has counts[t] rows, which follow one another in `product.x`; their results are the first rows
   of the tile in `product.out`. */
typedef struct {
    Product product;
    const int64_t *experts, *counts;
    int64_t tiles, size;
} Experts;

/* The part of a weight from row `row` on. */
static Weight rows_from(const Weight *weight, int64_t row) {
    Weight part = *weight;
    part.data += row * part.stride;
    if (part.low) part.low += row * (part.columns / 2);
    if (part.base) part.base += row;
    if (part.scale) {
        int64_t size = part.scale_format == F32 ? 4 : 2;
        part.scale += row * size;
        part.offset += row * size;
    }
    part.first += row;
    return part;
}

static void experts_part(const void *job, int64_t first, int64_t end) {
    const Experts *e = job;
    int64_t outputs = e->product.outputs, before = 0;
    for (int64_t tile = 0; tile < e->tiles && tile * outputs < end; before += e->counts[tile++]) {
        int64_t from = first - tile * outputs, to = end - tile * outputs;
        if (to > outputs) to = outputs;
        if (from < 0) from = 0;
        if (from >= to || e->experts[tile] < 0 || !e->counts[tile]) continue;
        Weight weight = rows_from(e->product.weight, e->experts[tile] * outputs);
        Product product = e->product;
        product.weight = &weight;
        product.x += before * product.x_stride;
        product.out += tile * e->size * product.out_stride;
        product.rows = e->counts[tile];
        kernels->product(&product, from, to);
    }
}

EXPORT void triforce_experts(const Experts *e, int threads) {
    divide(experts_part, e, e->tiles * e->product.outputs, outputs_at_once(&e->product, threads),
           threads);
}

/* For a check against `library.py`. */
EXPORT int triforce_size_of_experts(void) { return sizeof(Experts); }

/* `grouped.in_tiles`, for rows that chose `active` of `count` experts each. sizes: room for `count`
   numbers. Returns 0 for an expert that is not there. */
EXPORT int triforce_tiles(const int64_t *chosen, int64_t rows, int64_t active, int64_t count,
                          int64_t tiles, int64_t size, int64_t *order, int64_t *own,
                          int64_t *which, int64_t *places, int64_t *sizes) {
    for (int64_t i = 0; i < tiles * size; i++) order[i] = own[i] = -1;
    for (int64_t t = 0; t < tiles; t++) which[t] = -1;
    for (int64_t e = 0; e < count; e++) sizes[e] = 0;
    for (int64_t i = 0; i < rows * active; i++) {
        if (chosen[i] < 0 || chosen[i] >= count) return 0;
        sizes[chosen[i]]++;
    }
    /* From here on, the place of an expert's next row. */
    int64_t tile = 0;
    for (int64_t e = 0; e < count; e++) {
        int64_t needed = (sizes[e] + size - 1) / size;
        sizes[e] = tile * size;
        for (; needed; needed--) which[tile++] = e;
    }
    for (int64_t i = 0; i < rows * active; i++) {
        int64_t place = places[i] = sizes[chosen[i]]++;
        order[place] = i / active;
        own[place] = place;
    }
    return 1;
}

/* out [rows, columns] += the sums of `active` outputs of each row, at `places`, by its weights. */
EXPORT void triforce_weighted_sums(const float *outputs, const int64_t *places,
                                   const float *weights, int64_t rows, int64_t active,
                                   int64_t columns, float *out) {
    for (int64_t row = 0; row < rows; row++, out += columns)
        for (int64_t a = 0; a < active; a++) {
            const float *from = outputs + places[row * active + a] * columns;
            float weight = weights[row * active + a];
            for (int64_t i = 0; i < columns; i++) out[i] += from[i] * weight;
        }
}
