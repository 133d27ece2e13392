/* What Python calls: a product, decoding, attention, each divided among threads. */
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "host.h"
#include "threads.h"

#if defined(__x86_64__)
extern const Kernels kernels_avx512, kernels_avx2;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif
extern const Kernels kernels_plain;

static const Kernels *const MAKES[] = {
#if defined(__x86_64__)
    &kernels_avx512, &kernels_avx2,
#elif defined(__aarch64__)
    &kernels_neon,
#endif
    &kernels_plain,
};
enum { COUNT = sizeof MAKES / sizeof *MAKES };

const Kernels *kernels = &kernels_plain;

/* The version of this interface (`library.py`). */
EXPORT int triforce_version(void) { return 14; }

/* Sizes of structures, for a check against those of `structures.py`. */
EXPORT int triforce_size_of_weight(void) { return sizeof(Weight); }
EXPORT int triforce_size_of_product(void) { return sizeof(Product); }

/* Returns the name of the `index`th make that runs here, or NULL; the best one is the first. */
EXPORT const char *triforce_make(int index) {
    for (int i = 0; i < COUNT; i++)
        if (MAKES[i]->runs_here() && index-- == 0) return MAKES[i]->name;
    return NULL;
}

float half_numbers[1 << 16], half_powers[1 << 8];
uint32_t grid_iq3_xxs[256], grid_iq3_s[512], grid_iq2_xxs[512], grid_iq2_xs[1024], grid_iq2_s[2048];

/* Fills the table of a format. */
EXPORT void triforce_fill_grid(int64_t format, const uint32_t *words, int64_t count) {
    uint32_t *grid = format == IQ3_XXS   ? grid_iq3_xxs
                     : format == IQ3_S   ? grid_iq3_s
                     : format == IQ2_XXS ? grid_iq2_xxs
                     : format == IQ2_XS  ? grid_iq2_xs
                                         : grid_iq2_s;
    memcpy(grid, words, count * sizeof *words);
}

/* Fills the tables of numbers. */
static void __attribute__((constructor)) fill_tables(void) {
    for (int bits = 0; bits < 1 << 8; bits++) half_powers[bits] = ldexpf(1, bits - 128);
    for (int bits = 0; bits < 1 << 16; bits++) {
        int exponent = bits >> 10 & 31, mantissa = bits & 1023;
        float size = exponent == 0    ? ldexpf((float)mantissa, -24)
                     : exponent < 31 ? ldexpf((float)(1024 + mantissa), exponent - 25)
                     : mantissa      ? NAN
                                     : INFINITY;
        half_numbers[bits] = bits >> 15 ? -size : size;
    }
}

/* Uses the kernels of the `index`th make that runs here. */
EXPORT void triforce_use_make(int index) {
    for (int i = 0; i < COUNT; i++)
        if (MAKES[i]->runs_here() && index-- == 0) kernels = MAKES[i];
}

static void product_part(const void *job, int64_t first, int64_t end) {
    kernels->product(job, first, end);
}

Task product_task(const Product *p, int threads) {
    return (Task){product_part, p, p->outputs, outputs_at_once(p, threads)};
}

EXPORT void triforce_product(const Product *p, int threads) {
    Task task = product_task(p, threads);
    divide_all(&task, 1, threads);
}

typedef struct {
    const Weight *weight;
    float *out;
} Decoded;

static void decoded_part(const void *job, int64_t first, int64_t end) {
    const Decoded *d = job;
    int64_t columns = d->weight->columns;
    for (int64_t row = first; row < end; row++)
        kernels->decode(d->weight, row, 0, columns, d->out + row * columns);
}

/* Decodes `rows` rows of a weight to float32: out [rows, columns]. */
EXPORT void triforce_decode(const Weight *weight, int64_t rows, float *out, int threads) {
    Decoded d = {weight, out};
    divide(decoded_part, &d, rows, rows_at_once(weight->columns), threads);
}

typedef struct {
    const uint64_t *numbers;
    _Atomic uint64_t sum;
} Read;

static void read_part(const void *job, int64_t first, int64_t end) {
    Read *read = (Read *)job;
    atomic_fetch_add(&read->sum, kernels->sum(read->numbers + first, end - first));
}

/* Reads memory, and nothing else: what a benchmark holds the kernels against. */
EXPORT uint64_t triforce_sum(const uint64_t *numbers, int64_t count, int threads) {
    Read read = {numbers, 0};
    divide(read_part, &read, count, 1 << 15, threads);
    return read.sum;
}
