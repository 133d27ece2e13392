/* Several threads call helpers at once, more and fewer of them, and some sleep in between. Compiled
   with ThreadSanitizer by test_host_sequence.py. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <time.h>

#include "threads.h"

enum { COUNT = 512, ROUNDS = 1500, CALLERS = 3 };

const Kernels *kernels;

static void add_one(const void *job, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) ((int64_t *)job)[i]++;
}

/* Reads what other threads wrote in the task before. */
static void add_next(const void *job, int64_t first, int64_t end) {
    int64_t *numbers = (int64_t *)job;
    for (int64_t i = first; i < end; i++) numbers[COUNT + i] = numbers[i] + numbers[(i + 37) % COUNT];
}

static void *run(void *failed) {
    int64_t numbers[2 * COUNT];
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < COUNT; i++) numbers[i] = round + i;
        Task tasks[] = {{add_one, numbers, COUNT, 16},
                        {add_next, numbers, COUNT, 32},
                        {add_one, numbers + COUNT, COUNT, COUNT}};
        divide_all(tasks, 3, 2 + round / 300 % 3);
        for (int i = 0; i < COUNT; i++)
            if (numbers[COUNT + i] != 2 * (round + 1) + i + (i + 37) % COUNT + 1) *(int *)failed = 1;
        if (round % 100 == 0) nanosleep(&(struct timespec){0, 400000}, NULL);
    }
    return NULL;
}

int main(void) {
    pthread_t callers[CALLERS];
    int failed[CALLERS + 1] = {0};
    for (int i = 0; i < CALLERS; i++) pthread_create(callers + i, NULL, run, failed + i);
    run(failed + CALLERS);
    for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
    for (int i = 0; i <= CALLERS; i++)
        if (failed[i]) return puts("wrong numbers"), 1;
    return 0;
}
