/* The small operations of a layer: rows are divided among threads, if there are many. */
#include <math.h>
#include <stddef.h>

#include "host.h"
#include "threads.h"

static void norm_part(const void *job, int64_t first, int64_t end) {
    kernels->norm(job, first, end);
}

EXPORT void triforce_norm(const Norm *p, int threads) {
    divide(norm_part, p, p->rows * p->heads, rows_at_once(p->width), threads);
}

static void gated_part(const void *job, int64_t first, int64_t end) {
    kernels->gated(job, first, end);
}

EXPORT void triforce_gated(const Gate *p, int threads) {
    divide(gated_part, p, p->rows, rows_at_once(4 * p->width), threads);
}

static void rope_part(const void *job, int64_t first, int64_t end) {
    kernels->rope(job, first, end);
}

EXPORT void triforce_rope(const Rope *p, int threads) {
    divide(rope_part, p, p->tokens, rows_at_once(p->heads * p->head_dim), threads);
}

EXPORT void triforce_map(int64_t operation, const float *x, float *out, int64_t count) {
    kernels->map(operation, x, out, count);
}

/* For checks against `library.py`. */
EXPORT int triforce_size_of_norm(void) { return sizeof(Norm); }
EXPORT int triforce_size_of_gate(void) { return sizeof(Gate); }
EXPORT int triforce_size_of_rope(void) { return sizeof(Rope); }
