"""How many bytes the parts of the runtime take. No tensors: a plan is made of these."""

from __future__ import annotations

from offload.kv.shape import KVShape

COPY_BYTES = 8 << 20
"""A copy over an emulated link: no copy costs anything besides its bytes."""
ROUND_TOKENS = 16
"""Capacities are multiples of it, so that rows of a mask are aligned as CUDA kernels want them."""
GATHER_BUFFERS = 2
"""While one layer's chunks cross the link, the next layer's are collected."""
SCORE_GROUPS = 8
"""Into how many groups of consecutive tokens a pass's queries are averaged."""
SCORE_ITEMSIZE = 2
"""Of the scores of a pass: bfloat16, since they are only compared."""
SCORED_TOKENS = 16
"""Queries at the end of a prompt by which its chunks are scored."""


def dense_bytes(shape: KVShape, tokens: int) -> int:
    """Device bytes of a DenseKV with room for `tokens` tokens."""
    return shape.token_bytes * shape.layers * dense_capacity(tokens)


def dense_capacity(tokens: int) -> int:
    return -(-tokens // ROUND_TOKENS) * ROUND_TOKENS


def reader_bytes(shape: KVShape, tokens: int) -> int:
    """Device bytes of a ChunkReader, and its host bytes."""
    return GATHER_BUFFERS * shape.token_bytes * tokens


def scores_bytes(shape: KVShape, chunk_tokens: int, context_tokens: int) -> int:
    """Device bytes of a ChunkScores: float32 sums, and the groups of the last pass."""
    chunks = -(-context_tokens // chunk_tokens)
    return shape.layers * shape.kv_heads * chunks * (4 + SCORE_GROUPS * SCORE_ITEMSIZE)
