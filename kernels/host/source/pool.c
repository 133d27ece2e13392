/* Each thread that calls has helpers of its own, which live as long as it does.

   A helper without work asks for more during AWAKE nanoseconds, and lets other threads run meanwhile:
   the calls of a forward follow one another sooner than a sleeping thread could be woken. Then it
   sleeps. The caller waits for helpers that have begun, and for no others. */
#define _POSIX_C_SOURCE 200809L
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { MOST_HELPERS = 255, AWAKE = 200000, ROUNDS = 64 };
/* Set in `inside` while there is nothing to help with. */
#define CLOSED (1 << 30)

/* function, data, wanted: what to help with, and how many helpers are to; not written unless CLOSED
   call: the number of calls so far
   inside: how many helpers look at these, and CLOSED
   asleep: how many helpers sleep or are about to; changes under the lock
   ends: whether the caller's thread has ended
   most: how many helpers there can be, as the system allows */
typedef struct {
    Function function;
    void *data;
    int wanted;
    _Alignas(64) _Atomic uint64_t call;
    _Atomic int ends;
    _Alignas(64) _Atomic int inside;
    _Alignas(64) _Atomic int asleep;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int helpers, most;
    pthread_t threads[MOST_HELPERS];
} Pool;

typedef struct {
    Pool *pool;
    int index;
} Helper;

static _Thread_local Pool *own = NULL;
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Returns after a call that is not `seen`, or when the pool ends. */
static void await_call(Pool *pool, uint64_t seen) {
    for (int64_t end = now() + AWAKE; now() < end; sched_yield())
        for (int i = 0; i < ROUNDS; i++) {
            if (atomic_load(&pool->call) != seen || atomic_load(&pool->ends)) return;
            pause_briefly();
        }
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->asleep, 1);
    while (atomic_load(&pool->call) == seen && !atomic_load(&pool->ends))
        pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->asleep, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void *help(void *data) {
    Helper helper = *(Helper *)data;
    Pool *pool = helper.pool;
    free(data);
    for (uint64_t seen = 0;;) {
        await_call(pool, seen);
        if (atomic_load(&pool->ends)) return NULL;
        seen = atomic_load(&pool->call);
        if (!(atomic_fetch_add(&pool->inside, 1) & CLOSED) && helper.index < pool->wanted)
            pool->function(pool->data, helper.index + 1);
        atomic_fetch_sub(&pool->inside, 1);
    }
}

static void end_pool(void *data) {
    Pool *pool = data;
    own = NULL;
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->ends, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->helpers; i++) pthread_join(pool->threads[i], NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->wake);
    free(pool);
}

/* A process that is forked has none of the helpers. */
static void forget(void) {
    own = NULL;
    pthread_setspecific(key, NULL);
}

static void prepare(void) {
    pthread_key_create(&key, end_pool);
    pthread_atfork(NULL, NULL, forget);
}

/* Returns this thread's helpers, as many as are wanted if threads can be had; NULL without memory. */
static Pool *pool_of(int wanted) {
    pthread_once(&once, prepare);
    if (own && own->helpers > wanted) {
        /* They would wake for each call, and have nothing to do. */
        pthread_setspecific(key, NULL);
        end_pool(own);
    }
    if (!own) {
        Pool *pool = aligned_alloc(_Alignof(Pool), sizeof(Pool));
        if (!pool) return NULL;
        *pool = (Pool){.inside = CLOSED, .most = MOST_HELPERS};
        pthread_mutex_init(&pool->lock, NULL);
        pthread_cond_init(&pool->wake, NULL);
        pthread_setspecific(key, own = pool);
    }
    while (own->helpers < wanted && own->helpers < own->most) {
        Helper *helper = malloc(sizeof *helper);
        if (helper) *helper = (Helper){own, own->helpers};
        if (helper && !pthread_create(own->threads + own->helpers, NULL, help, helper)) {
            own->helpers++;
            continue;
        }
        free(helper);
        own->most = own->helpers;
    }
    return own;
}

void with_help(Function function, void *data, int helpers) {
    Pool *pool = helpers > 0 ? pool_of(helpers) : NULL;
    if (!pool) {
        function(data, 0);
        return;
    }
    pool->function = function, pool->data = data, pool->wanted = helpers;
    atomic_fetch_and(&pool->inside, ~CLOSED);
    atomic_fetch_add(&pool->call, 1);
    if (atomic_load(&pool->asleep)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
    function(data, 0);
    atomic_fetch_or(&pool->inside, CLOSED);
    for (unsigned i = 1; atomic_load(&pool->inside) != CLOSED; i++)
        if (i % ROUNDS) pause_briefly();
        else sched_yield();
}
