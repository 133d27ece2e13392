/* Recurrent layers: heads are divided among threads, each of which has room for states of its own. */
#include <stdatomic.h>
#include <stdlib.h>

#include "host.h"
#include "threads.h"

typedef struct {
    const Rule *rule;
    int64_t states;
    _Atomic int failed;
} Work;

static void heads_part(const void *job, int64_t first, int64_t end) {
    Work *work = (Work *)job;
    const Rule *r = work->rule;
    size_t size = sizeof(float) * (size_t)(work->states * r->key_dim * r->value_dim);
    float *states = size ? malloc(size) : NULL;
    if (size && !states) {
        atomic_store(&work->failed, 1);
        return;
    }
    for (int64_t head = first; head < end; head++) kernels->delta(r, head, states);
    free(states);
}

/* Computes rows from a state and from rows that were left behind (`host.h`). Returns 0 for lack of
   memory: never if the state advances, which needs none, so a state is never half advanced. */
EXPORT int triforce_delta(const Rule *rule, int threads) {
    Work work = {rule, !rule->advances, 0};
    for (int64_t row = 0; rule->visible && row < rule->rows; row++) {
        int64_t states = 1;
        for (int64_t i = 0; i <= row; i++) states += rule->visible[row * rule->rows + i] != 0;
        if (states > work.states) work.states = states;
    }
    divide(heads_part, &work, rule->heads, 1, threads);
    return !work.failed;
}

EXPORT int triforce_size_of_rule(void) { return sizeof(Rule); }
