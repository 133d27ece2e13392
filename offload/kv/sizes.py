"""How many bytes the parts of the runtime take. No tensors: a plan is made of these."""

from __future__ import annotations

from triforce_kernels.limits import KV_CODED_AT_ONCE, KV_CODING_BYTES
from triforce_offload.kv.shape import KVShape
from triforce_offload.weights.formats import aligned

# A copy over an emulated link has about so many bytes: its size costs nothing there.
COPY_BYTES = 8 << 20
# Capacities are multiples of so many tokens: rows of a mask are then aligned as CUDA kernels want
# them.
ROUND_TOKENS = 16
# Chunks are gathered in so many buffers: while one layer's cross the link, the next layer's are
# collected.
GATHER_BUFFERS = 2
# A pass's queries are averaged in so many groups of consecutive tokens.
SCORE_GROUPS = 8
# A score of a pass has so many bytes: bfloat16, since scores are only compared.
SCORE_ITEMSIZE = 2
# A prompt's chunks are scored by so many queries at its end.
SCORED_TOKENS = 16
# Numbers that are rounded at a time, unless a layer has more.
_ROUNDED_AT_ONCE = 1 << 22


def dense_bytes(shape: KVShape, tokens: int) -> int:
    """Device bytes of a DenseKV with room for `tokens` tokens."""
    return shape.token_bytes * shape.layers * dense_capacity(tokens)


def rounded_bytes(shape: KVShape, tokens: int) -> int:
    """Device bytes of a RoundedKV with room for `tokens` tokens."""
    numbers = dense_bytes(shape, tokens) // shape.dtype.itemsize
    return numbers + scale_bytes(shape)


def scale_bytes(shape: KVShape) -> int:
    """Of the scales of a RoundedKV, in float32."""
    return aligned(4 * shape.layers * 2 * shape.kv_heads * shape.head_dim)


def layers_rounded_at_once(layers: int, numbers: int) -> int:
    """How many of some layers, each of so many numbers, are rounded at a time."""
    return max(1, min(layers, _ROUNDED_AT_ONCE // max(1, numbers)))


def rounding_bytes(shape: KVShape, tokens: int) -> int:
    """Device bytes of temporaries while `tokens` tokens are rounded: as they come, in float32, as
    whole numbers and put with those that stay.
    """
    numbers = 2 * shape.kv_heads * tokens * shape.head_dim
    at_once = layers_rounded_at_once(shape.layers, numbers)
    return at_once * numbers * (2 * shape.dtype.itemsize + 4 + 2)


def dense_capacity(tokens: int) -> int:
    return -(-tokens // ROUND_TOKENS) * ROUND_TOKENS


def coding_bytes(shape: KVShape) -> int:
    """Device bytes of temporaries while a block is coded or decoded."""
    if not shape.split:
        return 0
    at_once = max(KV_CODED_AT_ONCE, shape.block_tokens * shape.head_dim)
    return KV_CODING_BYTES * min(shape.numbers, at_once)


def reader_bytes(shape: KVShape, tokens: int) -> int:
    """Device bytes of a ChunkReader, and its host bytes."""
    return GATHER_BUFFERS * shape.token_bytes * tokens


def scores_bytes(shape: KVShape, chunk_tokens: int, context_tokens: int) -> int:
    """Device bytes of a ChunkScores: float32 sums, and the groups of the last pass."""
    chunks = -(-context_tokens // chunk_tokens)
    return shape.layers * shape.kv_heads * chunks * (4 + SCORE_GROUPS * SCORE_ITEMSIZE)
