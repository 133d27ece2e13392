/* The kernels of one make of vector units, as `host.h` lists them. A file defines NAME and RUNS_HERE
   before it includes this one. */
#include "../attention.h"
#include "../layer.h"
#include "../product.h"
#include "../recurrent.h"
#include "../split_kv.h"

static int runs_here(void) { return RUNS_HERE; }

static uint64_t sum(const uint64_t *numbers, int64_t count) {
    typedef uint64_t words __attribute__((vector_size(4 * W), aligned(8), may_alias));
    enum { EACH = sizeof(words) / 8 };
    words sums[8] = {{0}};
    int64_t i = 0;
    for (; i + 8 * EACH <= count; i += 8 * EACH)
        for (int j = 0; j < 8; j++) sums[j] += *(const words *)(numbers + i + j * EACH);
    uint64_t total = 0;
    for (int j = 0; j < 8; j++)
        for (int k = 0; k < EACH; k++) total += sums[j][k];
    for (; i < count; i++) total += numbers[i];
    return total;
}

#define TEXT(name) #name
#define TEXT_OF(name) TEXT(name)
#define JOINED(first, second) first##second
#define NAMED(name) JOINED(kernels_, name)

const Kernels NAMED(NAME) = {
    TEXT_OF(NAME), runs_here, product, decode, decode_kv, attend, merge, attend_whole,
    delta,         norm,      gated,   rope,   map,       sum,
};
