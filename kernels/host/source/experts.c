/* Mixtures of experts: rows are divided into tiles, each of one expert, and multiplied by that
   expert's rows of a weight (`triforce_kernels.experts`). */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "host.h"
#include "threads.h"

/* A product of tiles of rows. Tile t is of expert experts[t], or of none if that is negative, and has
   counts[t] rows, which follow one another in `product.x`; their results are the first of the tile's
   `size` rows in `product.out`, or follow one another there as well if `size` is 0. `product.bias`
   has the biases of all experts, [experts, outputs]. */
typedef struct {
    Product product;
    const int64_t *experts, *counts;
    int64_t tiles, size;
} Experts;

/* How experts are chosen; see `routing.Choice`. */
typedef struct {
    int64_t rows, count, active, sigmoid, normalised, groups, chosen_groups;
    float scale;
} Choice;

/* The matrix of an expert, of `rows` rows. */
static Weight of_expert(const Weight *weight, int64_t expert, int64_t rows) {
    Weight part = *weight;
    int64_t row = expert * rows, before = expert * weight->apart;
    if (weight->apart) {
        part.data += before, part.low += before, part.base += before;
        part.places += before / (int64_t)sizeof *part.places;
        part.patterns += before / (int64_t)sizeof *part.patterns;
        part.starts += before / (int64_t)sizeof *part.starts;
        return part;
    }
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
        Weight weight = of_expert(e->product.weight, e->experts[tile], outputs);
        Product product = e->product;
        product.weight = &weight;
        product.x += before * product.x_stride;
        product.out += (e->size ? tile * e->size : before) * product.out_stride;
        if (product.bias) product.bias += e->experts[tile] * outputs;
        product.rows = e->counts[tile];
        kernels->product(&product, from, to);
    }
}

static Task experts_task(const Experts *e, int threads) {
    return (Task){experts_part, e, e->tiles * e->product.outputs,
                  outputs_at_once(&e->product, threads)};
}

EXPORT void triforce_experts(const Experts *e, int threads) {
    Task task = experts_task(e, threads);
    divide_all(&task, 1, threads);
}

/* For a check against `library.py`. */
EXPORT int triforce_size_of_experts(void) { return sizeof(Experts); }

/* `grouped.in_tiles`, for rows that chose `active` of `count` experts each, or none where a number is
   negative. sizes: room for `count` numbers. Returns 0 for an expert that is not there. */
EXPORT int triforce_tiles(const int64_t *chosen, int64_t rows, int64_t active, int64_t count,
                          int64_t tiles, int64_t size, int64_t *order, int64_t *own,
                          int64_t *which, int64_t *places, int64_t *sizes) {
    for (int64_t i = 0; i < tiles * size; i++) order[i] = own[i] = -1;
    for (int64_t t = 0; t < tiles; t++) which[t] = -1;
    for (int64_t e = 0; e < count; e++) sizes[e] = 0;
    for (int64_t i = 0; i < rows * active; i++) {
        if (chosen[i] >= count) return 0;
        if (chosen[i] >= 0) sizes[chosen[i]]++;
    }
    /* From here on, the place of an expert's next row. */
    int64_t tile = 0;
    for (int64_t e = 0; e < count; e++) {
        int64_t needed = (sizes[e] + size - 1) / size;
        sizes[e] = tile * size;
        for (; needed; needed--) which[tile++] = e;
    }
    for (int64_t i = 0; i < rows * active; i++) {
        places[i] = -1;
        if (chosen[i] < 0) continue;
        int64_t place = places[i] = sizes[chosen[i]]++;
        order[place] = i / active;
        own[place] = place;
    }
    return 1;
}

/* Scores of a row's experts: sigmoids of its products, or a softmax over them. */
static void scores_of_row(const float *products, int64_t count, int sigmoid, float *scores) {
    float peak = -INFINITY, total = 0;
    for (int64_t e = 0; e < count; e++)
        if (products[e] > peak) peak = products[e];
    for (int64_t e = 0; e < count; e++) {
        scores[e] = sigmoid ? 1 / (1 + expf(-products[e])) : expf(products[e] - peak);
        total += scores[e];
    }
    for (int64_t e = 0; !sigmoid && e < count; e++) scores[e] /= total;
}

/* The greatest of numbers, the first one among equals. */
static int64_t greatest(const float *numbers, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (numbers[i] > numbers[best]) best = i;
    return best;
}

/* Makes -inf of the numbers outside of the chosen groups. sums: room for a number for each group */
static void keep_groups(float *numbers, int64_t count, const Choice *c, float *sums) {
    int64_t size = count / c->groups;
    for (int64_t g = 0; g < c->groups; g++) {
        float best = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            if (numbers[e] > best) second = best, best = numbers[e];
            else if (numbers[e] > second) second = numbers[e];
        }
        sums[g] = size > 1 ? best + second : best;
    }
    for (int64_t left = c->groups - c->chosen_groups; left > 0; left--) {
        int64_t worst = -1;
        for (int64_t g = 0; g < c->groups; g++)
            if (sums[g] == sums[g] && (worst < 0 || sums[g] <= sums[worst])) worst = g;
        if (worst < 0) return;
        sums[worst] = NAN;
        for (int64_t e = worst * size; e < (worst + 1) * size; e++) numbers[e] = -INFINITY;
    }
}

/* `routing.choose`: products [rows, count], bias [count] or NULL, chosen and weights [rows, active].
   room: 3 * count numbers */
EXPORT void triforce_choose(const Choice *c, const float *products, const float *bias,
                            int64_t *chosen, float *weights, float *room) {
    float *scores = room, *wanted = room + c->count, *sums = room + 2 * c->count;
    for (int64_t row = 0; row < c->rows; row++, products += c->count) {
        scores_of_row(products, c->count, c->sigmoid, scores);
        for (int64_t e = 0; e < c->count; e++) wanted[e] = scores[e] + (bias ? bias[e] : 0);
        if (c->groups > 1) keep_groups(wanted, c->count, c, sums);
        float total = 0;
        for (int64_t a = 0; a < c->active; a++, chosen++) {
            *chosen = greatest(wanted, c->count);
            wanted[*chosen] = -INFINITY;
            weights[a] = scores[*chosen];
            total += weights[a];
        }
        for (int64_t a = 0; a < c->active; a++, weights++)
            *weights = (c->normalised ? *weights / total : *weights) * c->scale;
    }
}

EXPORT int triforce_size_of_choice(void) { return sizeof(Choice); }

/* out [rows, columns] += the sums of up to `active` outputs of each row, at those of its `places` that
   are not negative, by its weights. */
EXPORT void triforce_weighted_sums(const float *outputs, const int64_t *places,
                                   const float *weights, int64_t rows, int64_t active,
                                   int64_t columns, float *out) {
    for (int64_t row = 0; row < rows; row++, out += columns)
        for (int64_t a = 0; a < active; a++) {
            if (places[row * active + a] < 0) continue;
            const float *from = outputs + places[row * active + a] * columns;
            float weight = weights[row * active + a];
            for (int64_t i = 0; i < columns; i++) out[i] += from[i] * weight;
        }
}

/* The MLPs of the experts that rows chose, and their weighted sums.

   gate_up, down: a product with one expert's matrix: its weight has those of all experts, its biases
       are [count, outputs]
   gate: the activation between them
   x [rows, columns of gate_up], out [rows, outputs of down]
   chosen, weights: [rows, active]; a negative number is no expert
   room: for `rows * active` rows of what each step computes
   numbers: room for 4 * rows * active + count of them */
typedef struct {
    Product gate_up, down;
    Gate gate;
    const float *x;
    float *out;
    const int64_t *chosen;
    const float *weights;
    int64_t rows, active, count;
    float *room;
    int64_t *numbers;
} ExpertMLP;

/* Rows in the order of their experts: place i has row order[i] of `from`. */
typedef struct {
    const float *from;
    float *to;
    const int64_t *order;
    int64_t columns;
} Ordered;

static void ordered_part(const void *job, int64_t first, int64_t end) {
    const Ordered *o = job;
    for (int64_t place = first; place < end; place++)
        memcpy(o->to + place * o->columns, o->from + o->order[place] * o->columns,
               o->columns * sizeof *o->to);
}

typedef struct {
    const ExpertMLP *mlp;
    const float *outputs;
    const int64_t *places;
} Summed;

static void summed_part(const void *job, int64_t first, int64_t end) {
    const Summed *s = job;
    int64_t active = s->mlp->active, columns = s->mlp->down.outputs;
    float *out = s->mlp->out + first * columns;
    memset(out, 0, (end - first) * columns * sizeof *out);
    triforce_weighted_sums(s->outputs, s->places + first * active, s->mlp->weights + first * active,
                           end - first, active, columns, out);
}

/* Divides what rows chose into tiles of at most MOST_ROWS rows of one expert: its expert, its number
   of rows, and the row in each place. Returns the number of tiles, or -1 for an expert that is not
   there. sizes: room for `count` numbers */
static int64_t divided(const ExpertMLP *m, int64_t *experts, int64_t *counts, int64_t *order,
                       int64_t *places, int64_t *sizes) {
    int64_t pairs = m->rows * m->active, tiles = 0, place = 0;
    for (int64_t e = 0; e < m->count; e++) sizes[e] = 0;
    for (int64_t i = 0; i < pairs; i++) {
        if (m->chosen[i] >= m->count) return -1;
        if (m->chosen[i] >= 0) sizes[m->chosen[i]]++;
    }
    for (int64_t e = 0; e < m->count; e++) {
        int64_t size = sizes[e];
        /* From here on, the place of the expert's next row. */
        sizes[e] = place;
        place += size;
        for (; size > 0; size -= MOST_ROWS, tiles++) {
            experts[tiles] = e;
            counts[tiles] = size < MOST_ROWS ? size : MOST_ROWS;
        }
    }
    for (int64_t i = 0; i < pairs; i++) {
        places[i] = m->chosen[i] < 0 ? -1 : sizes[m->chosen[i]]++;
        if (places[i] >= 0) order[places[i]] = i / m->active;
    }
    return tiles;
}

/* Returns 0 for an expert that is not there. */
EXPORT int triforce_expert_mlp(const ExpertMLP *m, int threads) {
    int64_t pairs = m->rows * m->active, columns = m->gate_up.weight->columns, width = m->gate.width;
    int64_t *experts = m->numbers, *counts = experts + pairs, *order = counts + pairs;
    int64_t *places = order + pairs, *sizes = places + pairs;
    int64_t tiles = divided(m, experts, counts, order, places, sizes), placed = 0;
    if (tiles < 0) return 0;
    for (int64_t t = 0; t < tiles; t++) placed += counts[t];
    float *rows = m->room, *inner = rows + pairs * columns;
    float *activated = inner + pairs * m->gate_up.outputs, *outer = activated + pairs * width;
    Ordered ordered = {m->x, rows, order, columns};
    Experts up = {m->gate_up, experts, counts, tiles, 0}, down = {m->down, experts, counts, tiles, 0};
    up.product.x = rows, up.product.x_stride = columns;
    up.product.out = inner, up.product.out_stride = up.product.outputs;
    Gate gate = m->gate;
    gate.x = (const uint8_t *)inner, gate.x_row = up.product.outputs;
    gate.out = (uint8_t *)activated, gate.rows = placed;
    down.product.x = activated, down.product.x_stride = width;
    down.product.out = outer, down.product.out_stride = down.product.outputs;
    Summed summed = {m, outer, places};
    Task tasks[] = {
        {ordered_part, &ordered, placed, rows_at_once(columns)},
        experts_task(&up, threads),
        gated_task(&gate),
        experts_task(&down, threads),
        {summed_part, &summed, m->rows, rows_at_once(m->active * down.product.outputs)},
    };
    divide_all(tasks, sizeof tasks / sizeof *tasks, threads);
    return 1;
}

EXPORT int triforce_size_of_expertmlp(void) { return sizeof(ExpertMLP); }
