/* Work that is divided among threads, and the kernels that are in use. */
#pragma once

#include "host.h"

/* Runs a function in every thread of a team, as GNU's OpenMP library has it. The one that torch has
   loaded is used, so that both share their threads. */
typedef void (*Team)(void (*function)(void *), void *data, unsigned threads, unsigned flags);

extern const Kernels *kernels;

typedef void (*Part)(const void *job, int64_t first, int64_t end);

/* Computes parts of `step` of `count` items, each by whichever thread is free. */
void divide(Part part, const void *job, int64_t count, int64_t step, int threads);

/* How many rows of this width are worth waking a thread for. */
int64_t rows_at_once(int64_t columns);

/* How many outputs of a product are a part. */
int64_t outputs_at_once(const Product *p, int threads);
