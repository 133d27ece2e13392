/* Attention, divided among threads: by heads and splits of their keys, or by rows. */
#include <stddef.h>

#include "host.h"
#include "threads.h"

static void attention_part(const void *job, int64_t first, int64_t end) {
    const Attention *a = job;
    for (int64_t i = first; i < end; i++) kernels->attend(a, i / a->splits, i % a->splits);
}

Task attention_task(const Attention *a) {
    return (Task){attention_part, a, a->blocks > 0 && a->tokens > 0 ? a->heads * a->splits : 0, 1};
}

static void merge_part(const void *job, int64_t first, int64_t end) {
    kernels->merge(job, first, end);
}

Task merge_task(const Merge *m) {
    const Attention *a = m->attention;
    return (Task){merge_part, m, a->heads * a->rows, rows_at_once(a->splits * a->head_dim)};
}

/* Attends, if there are keys. Then merges the splits of the state, if `out` is given: out [heads,
   rows, head_dim] and the log-sum-exps [heads, rows]. */
EXPORT void triforce_attend(const Attention *a, float *out, float *lse, int threads) {
    Merge merge = {a, out, lse, a->rows, a->rows * a->head_dim, a->head_dim};
    Task tasks[] = {attention_task(a), merge_task(&merge)};
    divide_all(tasks, out ? 2 : 1, threads);
}

typedef struct {
    const Attention *attention;
    float *out, *lse;
} Whole;

static void whole_part(const void *job, int64_t first, int64_t end) {
    const Whole *w = job;
    int64_t parts = (w->attention->rows + MOST_QUERIES - 1) / MOST_QUERIES;
    for (int64_t i = first; i < end; i++)
        kernels->attend_whole(w->attention, i / parts, i % parts * MOST_QUERIES, w->out, w->lse);
}

/* Attends and merges, with the bits of `triforce_attend` but without a state: threads share the rows
   instead of the keys. */
EXPORT void triforce_attend_whole(const Attention *a, float *out, float *lse, int threads) {
    Whole whole = {a, out, lse};
    divide(whole_part, &whole, a->heads * ((a->rows + MOST_QUERIES - 1) / MOST_QUERIES), 1, threads);
}

/* For checks against `library.py`. */
EXPORT int triforce_size_of_attention(void) { return sizeof(Attention); }
EXPORT int triforce_size_of_merge(void) { return sizeof(Merge); }
