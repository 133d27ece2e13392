/* Divides work among the threads of torch's OpenMP library. */
#include "threads.h"

#include <stdatomic.h>
#include <stddef.h>

static Team team = NULL;

EXPORT void triforce_use_team(Team found) { team = found; }

typedef struct {
    Part part;
    const void *job;
    int64_t count, step;
    _Atomic int64_t next;
} Shared;

static void work(void *data) {
    Shared *shared = data;
    int64_t first;
    while ((first = atomic_fetch_add(&shared->next, shared->step)) < shared->count) {
        int64_t end = first + shared->step;
        shared->part(shared->job, first, end < shared->count ? end : shared->count);
    }
}

void divide(Part part, const void *job, int64_t count, int64_t step, int threads) {
    Shared shared = {part, job, count, step, 0};
    /* A team of another size than before would end threads and start others. */
    if (threads > 1 && count > step && team) team(work, &shared, (unsigned)threads, 0);
    else work(&shared);
}

/* Outputs of a part of a product: at least 8 parts a thread, if these are not too small. */
int64_t outputs_at_once(const Product *p, int threads) {
    int64_t step = p->outputs / (8 * threads), least = rows_at_once(p->weight->columns);
    return ((step < least ? least : step) + 7) / 8 * 8;
}

int64_t rows_at_once(int64_t columns) { return 1 + (1 << 15) / (columns > 0 ? columns : 1); }
