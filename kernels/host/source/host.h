/* What every file here shares: a weight as it is stored, a product, and the kernels of one make of
   vector units.

   Kernels exist once, in headers (`blocks.h`, `split.h`, `product.h`, `attention.h`), over a small
   layer of vectors (`vectors.h`). A file in `makes/` for each make of vector units compiles them, and
   `entry.c` chooses one when it is loaded. */
#pragma once

#include <stdint.h>

/* What Python calls; all else is hidden from other libraries. */
#define EXPORT __attribute__((visibility("default")))

/* Most rows of one call of a product (`limits.FEW_ROWS`). */
#define MOST_ROWS 64
/* Rows that share a tile of an attention. */
#define MOST_QUERIES 32

enum format {
    F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K,
    IQ4_NL, IQ4_XS, MXFP4, F8_E4M3, F8_HIGH, Q5_K_HIGH, Q6_K_HIGH,
    IQ3_XXS, IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S,
    INT4_128, INT4_64, INT4_32, INT8_128, INT8_64, INT8_32, NVFP4,
    SPLIT_BF16, HIGH_BF16, INT4, INT3
};

/* A matrix [rows, columns].

   data: first row; `stride` bytes from a row to the next
   low, base, places, patterns, starts, room, first: of a split matrix, see `SplitBF16Weight`;
       `room` is the length of `places`, `groups` that of `starts`
   apart: bytes from the matrix of an expert to the next, if a split one is of one expert alone; 0 if
       the rows of all follow one another
   scale, offset: of groups of `group` columns, [groups, rows] of `scale_format`, with
       `scale_stride` numbers from a group to the next */
typedef struct {
    int64_t format, columns, stride;
    const uint8_t *data, *low, *base;
    const int32_t *places, *starts;
    const uint16_t *patterns;
    int64_t room, groups, first, apart;
    const uint8_t *scale, *offset;
    int64_t group, scale_format, scale_stride;
} Weight;

/* out [rows, outputs] = x [rows, columns] times the transposed weight [outputs, columns].

   bias: [outputs], added to the products; NULL for none
   adds: whether results are added to `out`, and `factor`: what they are multiplied by before */
typedef struct {
    const Weight *weight;
    const float *x;
    float *out;
    const float *bias;
    int64_t rows, outputs, x_stride, out_stride, adds;
    float factor;
} Product;

/* Attention of queries [heads, rows, head_dim] to keys and values [blocks, heads, tokens, head_dim]
   of `format`, F32, F16, BF16 or INT8, added to a state in `splits` parts: acc [splits, heads, rows,
   head_dim], peak and total [splits, heads, rows], which are set first if it is `fresh`.

   query_head, ...: distances, of queries in numbers, of keys and values in bytes
   first_key: place in the text of the first key; the order of sums follows from it
   own: how many tokens at the end are the rows' own: of these row r sees those up to token r % own;
       0 if all rows see all tokens
   drafted: how many tokens at the end, the rows' own included, are a tree in which a token comes
       after the one it follows: row r sees those in row r % own of `visible` [own, drafted]; `own`
       if `visible` is NULL
   window: how many tokens up to its own a row sees, 0 for all
   scores: log-sum-exps of chunks of `chunk` tokens, from chunk `first_chunk` of a row; NULL for none */
enum { INT8 = -1 };
typedef struct {
    const float *query;
    const uint8_t *key, *value, *visible;
    float *acc, *peak, *total, *scores;
    int64_t format, heads, rows, head_dim, blocks, tokens, first_key, own, drafted, window, splits,
        fresh;
    int64_t query_head, query_row, key_block, key_head, key_row, value_block, value_head,
        value_row;
    int64_t scores_head, scores_row, first_chunk, chunk;
    float scale;
} Attention;

/* Merges the splits of the state of an attention. Row r of head h gives head h * rows / tokens + r /
   tokens of token r % tokens.

   out: `out_head` and `out_token` numbers from a head or a token to the next
   lse: the log-sum-exps [heads, rows]; NULL for none */
typedef struct {
    const Attention *attention;
    float *out, *lse;
    int64_t tokens, out_head, out_token;
} Merge;

/* A split block of keys and values, of `heads` heads of keys and of values together: high [heads,
   tokens, head_dim], low [heads, tokens, head_dim / 2], base [heads, head_dim], and exceptions at
   `room` places of the block; decoded to out, bfloat16.

   out_head, out_row: numbers from a head or a token to the next */
typedef struct {
    const uint8_t *high, *low, *base;
    const int32_t *places;
    const uint16_t *patterns;
    uint16_t *out;
    int64_t heads, tokens, head_dim, room, out_head, out_row;
} KVBlock;

/* Rows of a split FP8 matrix, see `SplitFP8Weight`, of `blocks` blocks each: high [rows, blocks, 84],
   bases [rows, blocks], and low bits in `room` bytes; joined to out [rows, blocks, 132]. */
typedef struct {
    const uint8_t *high, *bases, *low;
    const int32_t *starts;
    uint8_t *out;
    int64_t rows, blocks, room;
} JoinedFP8;

/* `blocks` blocks of `format`, Q5_K or Q6_K, and what they are split into: blocks of high bits,
   and low bits, see `SplitQuantsWeight`. */
typedef struct {
    const uint8_t *high, *low;
    uint8_t *out;
    int64_t blocks, format;
} JoinedQuants;

/* Norms of rows of `heads` heads of x, over `width` numbers of `format`, F32, F16 or BF16.

   delta: added to x first, in place, [rows, heads, width]; NULL for nothing
   weight: [width], or [heads, width]; NULL for ones
   x_row, ...: numbers from a row or a head to the next; weight_head: 0 if all have one weight
   adds: whether the results are added to `out`
   kind: NORM_RMS rounds before the product with the weight, NORM_RMS_FLOAT32 and NORM_LAYER do not;
       NORM_UNIT makes rows of length 1, with `eps` added to the square of the length
   factor: of the numbers, and offset: of the weights */
enum { NORM_RMS, NORM_RMS_FLOAT32, NORM_LAYER, NORM_UNIT };
typedef struct {
    uint8_t *x, *out;
    const uint8_t *delta, *weight;
    int64_t format, out_format, kind, rows, heads, width, x_row, x_head, out_row, out_head,
        weight_head, adds;
    float eps, offset, factor;
} Norm;

/* Functions of numbers. */
enum { MAP_SIGMOID, MAP_SILU, MAP_TANH, MAP_GELU, MAP_SOFTPLUS, GATE_CLAMPED };

/* out [rows, width] = operation(gate) * up of x [rows, 2 width], the gate first. */
typedef struct {
    const uint8_t *x;
    uint8_t *out;
    int64_t format, operation, rows, width, x_row;
} Gate;

/* Rotates queries and keys of x [tokens, heads, head_dim]: queries, then `kv_heads` keys, then as
   many values or none. Queries go to out [queries, tokens, head_dim], keys and values to caches from
   token `start`. cos, sin: [tokens, head_dim] */
typedef struct {
    const uint8_t *x, *cos, *sin;
    uint8_t *key, *value, *out;
    int64_t format, tokens, heads, queries, kv_heads, head_dim, start, x_row, x_head, key_head,
        key_row, value_head, value_row;
} Rope;

/* Rows of the gated delta rule or of Mamba-2, and a state [heads, key_dim, value_dim] before them.

   queries, keys [heads / group, rows, key_dim]: by the delta rule normed
   values, out [heads, rows, value_dim]; rates, logarithms of decays [heads, rows]
   past_keys, past_updates, past_decays: `past` rows between the state and the first row; ..._head:
       numbers from a head to the next
   updates: what each row adds to the state, which the kernel writes, `updates_head` numbers from a
       head to the next
   visible: which rows each row follows, [rows, rows], of a tree; NULL if each follows the one
       before it
   advances: whether the state becomes the one after the last row; else it stays. Not for trees
   corrects: whether an update is the rate times what the state lacks of a value, or times the
       value itself */
typedef struct {
    float *state, *out, *updates;
    const float *queries, *keys, *values, *decays, *rates, *past_keys, *past_updates, *past_decays;
    const uint8_t *visible;
    int64_t heads, group, rows, past, key_dim, value_dim, past_keys_head, past_updates_head,
        past_decays_head, updates_head, advances, corrects;
} Rule;

/* The kernels of one make of vector units.

   product: computes outputs `first` to `end`
   decode: writes `count` columns of a row from column `first`, both multiples of 256 or the last
   decode_kv: decodes rows `first` to `end` of the heads of a block, without exceptions
   attend: computes one split of one head
   merge: merges all splits of rows `first` to `end` of all heads together
   attend_whole: both for MOST_QUERIES rows of one head, without a state
   delta: computes all rows of one value head, with room for states
   norm, gated, rope: compute rows `first` to `end`
   map: computes a function of numbers
   sum: adds numbers, as fast as memory gives them: the bound of all others */
typedef struct {
    const char *name;
    int (*runs_here)(void);
    void (*product)(const Product *, int64_t first, int64_t end);
    void (*decode)(const Weight *, int64_t row, int64_t first, int64_t count, float *out);
    void (*decode_kv)(const KVBlock *, int64_t first, int64_t end);
    void (*attend)(const Attention *, int64_t head, int64_t split);
    void (*merge)(const Merge *, int64_t first, int64_t end);
    void (*attend_whole)(const Attention *, int64_t head, int64_t first_row, float *out,
                         float *lse);
    void (*delta)(const Rule *, int64_t head, float *states);
    void (*norm)(const Norm *, int64_t first, int64_t end);
    void (*gated)(const Gate *, int64_t first, int64_t end);
    void (*rope)(const Rope *, int64_t first, int64_t end);
    void (*map)(int64_t operation, const float *x, float *out, int64_t count);
    uint64_t (*sum)(const uint64_t *numbers, int64_t count);
} Kernels;
