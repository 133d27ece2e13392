/* Divides tasks among threads. */
#define _POSIX_C_SOURCE 200809L
#include "threads.h"

#include "pool.h"

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>

/* The first item of a task that no thread has begun, and how many items are done. */
typedef struct {
    _Alignas(64) _Atomic int64_t next;
    _Alignas(64) _Atomic int64_t done;
} Progress;

/* useful: how many threads have something to do, in the task with the most parts */
typedef struct {
    const Task *tasks;
    Progress *progress;
    int count;
    int64_t useful;
    int threads;
} Shared;

/* A thread takes one of this many shares of its part of what is left. */
enum { SHARES = 2 };

/* Waits until all items are done. A thread that waits for long lets others run: there may be fewer
   processors than threads. */
static void wait_for(_Atomic int64_t *done, int64_t count) {
    for (unsigned asked = 0; atomic_load_explicit(done, memory_order_acquire) < count; asked++)
        if (asked < 1 << 8) pause_briefly();
        else sched_yield();
}

/* Takes the next items: a share of those that are left, so that threads seldom ask while there are many
   and end together, but at least `step`. Returns the first one, and `end`. */
static int64_t begin_part(const Task *task, Progress *progress, int threads, int64_t *end) {
    int64_t first = atomic_load_explicit(&progress->next, memory_order_relaxed), count;
    do {
        int64_t left = task->count - first;
        if (left <= 0) return *end = first;
        count = left / (SHARES * threads) / task->step * task->step;
        if (count < task->step) count = task->step;
        *end = count < left ? first + count : task->count;
    } while (!atomic_compare_exchange_weak(&progress->next, &first, *end));
    return first;
}

static void work_on(void *data, int caller) {
    const Shared *shared = data;
    if (caller >= shared->useful) return;
    for (int i = 0; i < shared->count; i++) {
        const Task *task = shared->tasks + i;
        Progress *progress = shared->progress + i;
        int64_t first, end, done = 0;
        while ((first = begin_part(task, progress, shared->threads, &end)) < end) {
            task->part(task->job, first, end);
            done += end - first;
        }
        /* Threads wait longer for memory that another one writes than for a small part. */
        if (done) atomic_fetch_add(&progress->done, done);
        if (i + 1 < shared->count) wait_for(&progress->done, task->count);
    }
}

void divide_all(const Task *tasks, int count, int threads) {
    Progress progress[MOST_TASKS];
    Shared shared = {tasks, progress, count, 1, threads};
    for (int i = 0; i < count; i++) {
        int64_t parts = (tasks[i].count + tasks[i].step - 1) / tasks[i].step;
        if (parts > shared.useful) shared.useful = parts;
        progress[i].next = progress[i].done = 0;
    }
    with_help(work_on, &shared, shared.useful > 1 ? threads - 1 : 0);
}

void divide(Part part, const void *job, int64_t count, int64_t step, int threads) {
    Task task = {part, job, count, step};
    divide_all(&task, 1, threads);
}

/* Outputs of the least part of a product: an eighth of a thread's share, if that is not too small. */
int64_t outputs_at_once(const Product *p, int threads) {
    int64_t step = p->outputs / (8 * threads), least = rows_at_once(p->weight->columns);
    return ((step < least ? least : step) + 7) / 8 * 8;
}

int64_t rows_at_once(int64_t columns) { return 1 + (1 << 15) / (columns > 0 ? columns : 1); }
