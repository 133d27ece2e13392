/* Several calls, one after the other, which are described once and made for any number of rows. */
#include <stddef.h>

#include "host.h"
#include "threads.h"

/* One of the calls: `job` is a Product, a Norm, a Gate, a Rope, an Attention or a Merge. */
enum { CALL_PRODUCT, CALL_NORM, CALL_GATED, CALL_ROPE, CALL_ATTENTION, CALL_MERGE };
typedef struct {
    int64_t kind;
    const void *job;
} Call;

/* An address of a call, which differs from run to run: `field` becomes bases[base], plus `columns`
   float32 numbers for each row, plus `bytes`. */
typedef struct {
    uint8_t **field;
    int64_t base, columns, bytes;
} Place;

/* A number of a call, which differs with the number of rows: `field` becomes `times` as many. */
typedef struct {
    int64_t *field, times;
} Count;

typedef struct {
    const Call *calls;
    const Place *places;
    const Count *counts;
    int64_t call_count, place_count, count_count;
} Calls;

static Task task_of(const Call *call, int threads) {
    switch (call->kind) {
    case CALL_PRODUCT: return product_task(call->job, threads);
    case CALL_NORM: return norm_task(call->job);
    case CALL_GATED: return gated_task(call->job);
    case CALL_ROPE: return rope_task(call->job);
    case CALL_ATTENTION: return attention_task(call->job);
    default: return merge_task(call->job);
    }
}

/* Makes at most MOST_TASKS calls for some rows, each after the one before it. */
EXPORT void triforce_sequence(const Calls *s, uint8_t *const *bases, int64_t rows, int threads) {
    Task tasks[MOST_TASKS];
    for (int64_t i = 0; i < s->place_count; i++) {
        const Place *place = s->places + i;
        *place->field = bases[place->base] + 4 * rows * place->columns + place->bytes;
    }
    for (int64_t i = 0; i < s->count_count; i++) *s->counts[i].field = rows * s->counts[i].times;
    for (int64_t i = 0; i < s->call_count; i++) tasks[i] = task_of(s->calls + i, threads);
    divide_all(tasks, (int)s->call_count, threads);
}

/* For checks against `library.py`. */
EXPORT int triforce_size_of_call(void) { return sizeof(Call); }
EXPORT int triforce_size_of_place(void) { return sizeof(Place); }
EXPORT int triforce_size_of_count(void) { return sizeof(Count); }
EXPORT int triforce_size_of_calls(void) { return sizeof(Calls); }
