/* Tasks that are divided among threads, and the kernels that are in use. */
#pragma once

#include "host.h"

extern const Kernels *kernels;

typedef void (*Part)(const void *job, int64_t first, int64_t end);

/* `count` items, of which a free thread computes `step` at a time or more. */
typedef struct {
    Part part;
    const void *job;
    int64_t count, step;
} Task;

/* Computes the items of one task. */
void divide(Part part, const void *job, int64_t count, int64_t step, int threads);

/* Computes `count` tasks, at most MOST_TASKS, one after the other. Helpers are called once, and threads
   wait for one another by asking again and again. */
enum { MOST_TASKS = 24 };
void divide_all(const Task *tasks, int count, int threads);

Task product_task(const Product *p, int threads);
Task norm_task(const Norm *p);
Task gated_task(const Gate *p);
Task rope_task(const Rope *p);
Task attention_task(const Attention *a);
Task merge_task(const Merge *m);

/* How many rows of this width are worth a part of their own. */
int64_t rows_at_once(int64_t columns);

/* How many outputs of a product are a part. */
int64_t outputs_at_once(const Product *p, int threads);
