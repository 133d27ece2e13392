"""How many tokens and bytes the levels below the target take. No tensors are made here."""

from __future__ import annotations

from triforce_core.model.config import ModelConfig
from triforce_core.model.tensors import dense_layouts, kv_shape
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.sizes import dense_bytes, rounded_bytes, scores_bytes

# Rows of logits that `distributions` turns into distributions at a time.
DISTRIBUTION_ROWS = 16
# Tokens of the longest forward that is recorded as a graph.
LONGEST_RECORDED = 32
# Tokens that a small model which drafts attends to: the first of a text, and the recent ones.
SINKS = 16
WINDOW = 256


def window_tokens(config: ModelConfig, max_draft_tokens: int) -> int:
    """Capacity of a small model's cache: sinks, window, and room to draft and to slide rarely."""
    return min(config.trained_positions, SINKS + WINDOW + 2 * (max_draft_tokens + 1))


def small_model_shape(config: ModelConfig, like: KVShape) -> KVShape:
    return kv_shape(config, 1, like.dtype)


def small_model_parts_bytes(
    config: ModelConfig, like: KVShape, max_draft_tokens: int, windows: int = 1
) -> int:
    """Device bytes of a small model that drafts and of its windows, without its temporaries."""
    window = dense_bytes(small_model_shape(config, like), window_tokens(config, max_draft_tokens))
    return dense_layouts(config, like.dtype).nbytes + windows * window


def own_tokens(chunk_tokens: int, max_draft_tokens: int) -> int:
    """Tokens of a retrieval cache besides its budget: a chunk that fills, the last token and a
    draft.
    """
    return chunk_tokens + max_draft_tokens


def fitting_budget(budget: int, chunk_tokens: int, context_tokens: int) -> int:
    """A budget without the part that the context could never fill."""
    return min(budget, max(2, -(-context_tokens // chunk_tokens)) * chunk_tokens)


def retrieval_bytes(
    shape: KVShape,
    budget: int,
    chunk_tokens: int,
    max_draft_tokens: int,
    context_tokens: int,
    *,
    rounded: bool = False,
) -> int:
    """Device bytes of a retrieval cache, in 8 bits if `rounded`, and of what it is chosen by."""
    budget = fitting_budget(budget, chunk_tokens, context_tokens)
    tokens = budget + own_tokens(chunk_tokens, max_draft_tokens)
    chosen = chosen_bytes(shape, budget // chunk_tokens)
    kept = rounded_bytes(shape, tokens) if rounded else dense_bytes(shape, tokens)
    return kept + scores_bytes(shape, chunk_tokens, context_tokens) + chosen


def chosen_bytes(shape: KVShape, slots: int) -> int:
    """Device bytes of what says which chunk each slot of a retrieval cache holds."""
    return shape.layers * shape.kv_heads * slots * 8
