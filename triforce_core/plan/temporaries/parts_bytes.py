"""Upper bounds of the temporaries of parts that only some models have, in bytes."""

from __future__ import annotations

from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import Attention
from triforce_kernels.limits import (
    CAPPED_KEYS,
    FEW_ROWS,
    LOOKED_UP_AT_ONCE,
    SELECTION_BYTES,
    selection_bytes,
)

# Numbers of all residual streams of a row that exist at once, in the dtype: normed ones, twice,
# their gates, and what is added to them.
_STREAMS_AT_ONCE = 5
# Bytes of a number of the table while it is looked up: as stored, in float32, and as it is kept.
_LOOKING_UP_BYTES = 12
# For n-gram embeddings: keys, queries, values by stream, and inputs and outputs of the
# convolution; and in float32 products of keys and queries, and sums of the convolution.
_NGRAMS_AT_ONCE, _NGRAMS_IN_FLOAT32 = 8, 4


def streams_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return the bytes for residual streams around a mixer or an MLP, or for n-gram embeddings
    before a layer.
    """
    if config.streams is None:
        return 0
    wide = config.width
    around = tokens * (_STREAMS_AT_ONCE * wide * itemsize + config.hidden * (4 + 2 * itemsize))
    if (ngrams := config.ngrams) is None:
        return around
    before = ngrams.seen * wide * itemsize
    each = wide * (_NGRAMS_AT_ONCE * itemsize + 4 * _NGRAMS_IN_FLOAT32)
    # Rows of a tree see inputs of their own.
    return max(around, before + tokens * (each + ngrams.columns * 2 * itemsize))


def carried_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return the bytes of what the layers of a forward have beside hidden states: embeddings, keys
    and values that some layers use of others, and of few rows per-layer embeddings.
    """
    shared = sum(
        spec.mixer.kept
        for spec in config.layers
        if isinstance(spec.mixer, Attention) and spec.mixer.shares_kv
    )
    inputs = min(tokens, FEW_ROWS) * config.per_layer_columns * 2
    embedded = config.hidden if config.per_layer_inputs else 0
    return (tokens * (shared + embedded) + inputs) * itemsize


def looked_up_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return the bytes of per-layer embeddings, where they are looked up: of all different tokens,
    and of some at a time as they are stored and decoded.
    """
    different = min(tokens, config.vocab)
    at_once = min(different, LOOKED_UP_AT_ONCE) * _LOOKING_UP_BYTES
    return config.per_layer_columns * (different * itemsize + at_once)


def capped_bytes(mixer: Attention, rows: int, text_tokens: int) -> int:
    """Return the bytes for scores of `rows` rows that have a cap: which keys they see, and of some
    keys at a time the scores, a mask, keys and values, in float32, and what they add up to.
    """
    if mixer.score_cap is None:
        return 0
    keys = min(CAPPED_KEYS, text_tokens)
    scores = rows * keys * (mixer.heads + mixer.heads // mixer.kv_heads + 2)
    sums = 4 * rows * mixer.queries
    return (scores + keys * mixer.kept + sums) * 4 + rows * text_tokens * 3


def chosen_in_prompt_bytes(mixer: Attention, rows: int, itemsize: int, text_tokens: int) -> int:
    """Return the bytes for `rows` rows of a prompt that choose their keys: the vectors of all
    blocks as they are computed, and of some rows at a time scores and masks.
    """
    if (index := mixer.index) is None or text_tokens <= index.all_seen:
        return 0
    blocks = text_tokens // index.block
    each = selection_bytes(text_tokens, blocks, index.heads, itemsize)
    at_once = min(rows, max(1, SELECTION_BYTES // each))
    vectors = text_tokens * index.dim * 4 + blocks * index.dim * (4 * 6 + 2 * itemsize)
    return vectors + rows * index.rows * 3 * itemsize + at_once * each


def chosen_in_pass_bytes(mixer: Attention, rows: int, itemsize: int, text_tokens: int) -> int:
    """Likewise, for the rows of a pass: keys and values that each row chose, in the dtype and in
    float32, their scores, and the scores and the order of blocks.
    """
    if (index := mixer.index) is None or text_tokens <= index.all_seen:
        return 0
    blocks = text_tokens // index.block
    keys = index.all_seen * (mixer.kept * (2 * itemsize + 4) + mixer.heads * 12 + 40)
    scores = blocks * (index.heads * 12 + 48)
    of_blocks = blocks * index.dim * (itemsize + 4 * 6)
    return rows * (keys + scores + index.rows * 3 * itemsize) + of_blocks
