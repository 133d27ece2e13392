"""Sizes in bytes of the parts of the runtime. Plans use them, so there are no tensors here."""

from __future__ import annotations

from triforce_kernels.limits import KV_CODED_AT_ONCE, KV_CODING_BYTES
from triforce_offload.kv.shape import KVShape
from triforce_offload.weights.formats import aligned

# Approximate size of a copy over an emulated link, where the size makes no difference.
COPY_BYTES = 8 << 20
# Capacities are multiples of this many tokens, so that rows of a mask are aligned as CUDA kernels
# require.
ROUND_TOKENS = 16
# Number of gather buffers: while the chunks of one layer cross the link, the next layer's are
# collected.
GATHER_BUFFERS = 2
# Number of groups of consecutive tokens over which a pass's queries are averaged.
SCORE_GROUPS = 8
# Bytes of a score of a pass: bfloat16, since scores are only compared.
SCORE_ITEMSIZE = 2
# Number of queries at the end of a prompt that score its chunks.
SCORED_TOKENS = 16
# Number of numbers that are rounded at a time, unless one layer has more.
_ROUNDED_AT_ONCE = 1 << 22


def dense_bytes(shape: KVShape, tokens: int) -> int:
    """Return the device bytes of a DenseKV with room for `tokens` tokens."""
    return shape.token_bytes * shape.layers * dense_capacity(tokens)


def rounded_bytes(shape: KVShape, tokens: int) -> int:
    """Return the device bytes of a RoundedKV with room for `tokens` tokens."""
    numbers = dense_bytes(shape, tokens) // shape.dtype.itemsize
    return numbers + scale_bytes(shape)


def scale_bytes(shape: KVShape) -> int:
    """Return the bytes of the float32 scales of a RoundedKV."""
    return aligned(4 * shape.layers * shape.sides * shape.kv_heads * shape.head_dim)


def layers_rounded_at_once(layers: int, numbers: int) -> int:
    """Return how many of `layers` layers, each of `numbers` numbers, are rounded at a time."""
    return max(1, min(layers, _ROUNDED_AT_ONCE // max(1, numbers)))


def rounding_bytes(shape: KVShape, tokens: int) -> int:
    """Return the device bytes of temporaries while `tokens` tokens are rounded: the original
    numbers, float32 ones, integers, and these merged with the tokens that stay.
    """
    numbers = shape.sides * shape.kv_heads * tokens * shape.head_dim
    at_once = layers_rounded_at_once(shape.layers, numbers)
    return at_once * numbers * (2 * shape.dtype.itemsize + 4 + 2)


def dense_capacity(tokens: int) -> int:
    return -(-tokens // ROUND_TOKENS) * ROUND_TOKENS


def coding_bytes(shape: KVShape) -> int:
    """Return the device bytes of temporaries while a block is encoded or decoded."""
    if not shape.split:
        return 0
    at_once = max(KV_CODED_AT_ONCE, shape.block_tokens * shape.head_dim)
    return KV_CODING_BYTES * min(shape.numbers, at_once)


def reader_bytes(shape: KVShape, tokens: int) -> int:
    """Return the device bytes of a ChunkReader, which are also its host bytes."""
    return GATHER_BUFFERS * shape.token_bytes * tokens


def scores_bytes(shape: KVShape, chunk_tokens: int, context_tokens: int) -> int:
    """Return the device bytes of a ChunkScores: float32 sums, and the groups of the last pass."""
    chunks = -(-context_tokens // chunk_tokens)
    return shape.layers * shape.kv_heads * chunks * (4 + SCORE_GROUPS * SCORE_ITEMSIZE)
