/* The small operations of a layer: rows are divided among threads, if there are many. */
#include <math.h>
#include <stddef.h>

#include "host.h"
#include "threads.h"

static void norm_part(const void *job, int64_t first, int64_t end) {
    kernels->norm(job, first, end);
}

Task norm_task(const Norm *p) {
    return (Task){norm_part, p, p->rows * p->heads, rows_at_once(p->width)};
}

EXPORT void triforce_norm(const Norm *p, int threads) {
    Task task = norm_task(p);
    divide_all(&task, 1, threads);
}

static void gated_part(const void *job, int64_t first, int64_t end) {
    kernels->gated(job, first, end);
}

Task gated_task(const Gate *p) {
    return (Task){gated_part, p, p->rows, rows_at_once(4 * p->width)};
}

EXPORT void triforce_gated(const Gate *p, int threads) {
    Task task = gated_task(p);
    divide_all(&task, 1, threads);
}

static void rope_part(const void *job, int64_t first, int64_t end) {
    kernels->rope(job, first, end);
}

Task rope_task(const Rope *p) {
    return (Task){rope_part, p, p->tokens, rows_at_once(p->heads * p->head_dim)};
}

EXPORT void triforce_rope(const Rope *p, int threads) {
    Task task = rope_task(p);
    divide_all(&task, 1, threads);
}

EXPORT void triforce_map(int64_t operation, const float *x, float *out, int64_t count) {
    kernels->map(operation, x, out, count);
}

/* For checks against `library.py`. */
EXPORT int triforce_size_of_norm(void) { return sizeof(Norm); }
EXPORT int triforce_size_of_gate(void) { return sizeof(Gate); }
EXPORT int triforce_size_of_rope(void) { return sizeof(Rope); }
