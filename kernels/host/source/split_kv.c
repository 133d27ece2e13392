/* Split blocks of keys and values: their rows are divided among threads. */
#include "host.h"
#include "threads.h"

static void rows_part(const void *job, int64_t first, int64_t end) {
    kernels->decode_kv(job, first, end);
}

/* Decodes a block, then writes its exceptions. A damaged list cannot make it write elsewhere. */
EXPORT void triforce_decode_kv(const KVBlock *b, int threads) {
    int64_t rows = b->heads * b->tokens, numbers = rows * b->head_dim;
    divide(rows_part, b, rows, rows_at_once(b->head_dim), threads);
    for (int64_t i = 0; i < b->room; i++) {
        int64_t place = b->places[i], row = place / b->head_dim;
        if (place < 0 || place >= numbers) continue;
        int64_t head = row / b->tokens, token = row % b->tokens;
        b->out[head * b->out_head + token * b->out_row + place % b->head_dim] = b->patterns[i];
    }
}

EXPORT int triforce_size_of_kvblock(void) { return sizeof(KVBlock); }
