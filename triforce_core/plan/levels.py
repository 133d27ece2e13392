"""Tokens and bytes of the levels below the target. No tensors are created here."""

from __future__ import annotations

from triforce_core.model.config import ModelConfig
from triforce_core.model.heads.joins import LONGEST_RECORDED_HEAD
from triforce_core.model.parts.kept import kv_shape
from triforce_offload.kv.shape import CopiedShape, KVShape
from triforce_offload.kv.sizes import dense_bytes, rounded_bytes, scores_bytes
from triforce_offload.weights.formats import ElementType

# Number of rows of logits that `distributions` processes at a time.
DISTRIBUTION_ROWS = 16
# Number of tokens of the longest forward that is recorded as a graph.
LONGEST_RECORDED = 32
# Number of tokens of which a drafter of blocks takes the states at a time.
BLOCK_STATES = 512
# Number of tokens that a draft model attends to: the first of a sequence, and the recent ones.
SINKS = 16
WINDOW = 256


def window_tokens(config: ModelConfig, max_draft_tokens: int) -> int:
    """Return the capacity of a draft model's cache: sinks, window, and room for drafts, so that the
    window rarely slides. A drafter of blocks and an assistant have windows of their own.
    """
    joins = config.joins
    if joins and joins.context:
        return joins.context + 2 * joins.block
    return min(config.trained_positions, SINKS + WINDOW + 2 * (max_draft_tokens + 1))


def small_model_shape(config: ModelConfig, like: KVShape) -> KVShape:
    return kv_shape(config, 1, like.dtype)


def copied_shapes(
    config: ModelConfig, dtype: ElementType, max_draft_tokens: int
) -> tuple[CopiedShape, CopiedShape | None]:
    """Return the shapes of the keys and values that an assistant copies of the model that it drafts
    for: of a full-attention layer, and of a layer with a window, if it has one.
    """
    rows, lasts = max_draft_tokens + 1 + LONGEST_RECORDED_HEAD, config.joins.context
    full, windowed = config.attention, config.windowed
    of_full = CopiedShape(full.kv_heads, full.head_dim, SINKS, lasts, rows, dtype)
    if windowed is None:
        return of_full, None
    lasts = min(lasts, windowed.window)
    return of_full, CopiedShape(windowed.kv_heads, windowed.head_dim, 0, lasts, rows, dtype)


def small_model_parts_bytes(config: ModelConfig, like: KVShape, max_draft_tokens: int) -> int:
    """Return the device bytes of what a sequence has of a draft model: its window, and the states
    of a head.
    """
    tokens = window_tokens(config, max_draft_tokens)
    if config.joins and config.joins.copies_keys:
        shapes = copied_shapes(config, like.dtype, max_draft_tokens)
        window = sum(shape.nbytes for shape in shapes if shape)
    else:
        window = dense_bytes(small_model_shape(config, like), tokens)
    if config.joins:
        window += head_states_bytes(config, tokens, max_draft_tokens, like.dtype.itemsize)
    return window


def head_states_bytes(
    config: ModelConfig, window: int, max_draft_tokens: int, itemsize: int
) -> int:
    """Return the device bytes of the states that a head drafts from, with the hidden states that it
    takes from a pass and from recorded forwards of the retrieval level, or from a prompt.

    window: capacity of the head's cache
    """
    rows, joins = max_draft_tokens + 1 + 2 * LONGEST_RECORDED, config.joins
    tapped = max(rows, window + SINKS) * joins.tapped_width(config.hidden)
    # States of the tokens of the window, those before them, and a copy.
    states = 3 * (window + SINKS) * config.width
    if joins.block:
        # It keeps none of them.
        states = 0
    elif joins.copies_keys:
        # Those of the last tokens, and a copy; and the keys and values of some tokens, with what
        # rotates them.
        states = 2 * WINDOW * joins.width + 4 * BLOCK_STATES * joins.kept
    return (tapped + states) * itemsize


def own_tokens(chunk_tokens: int, max_draft_tokens: int) -> int:
    """Return the tokens of a retrieval cache beyond its budget: an incomplete chunk, the last token
    and a draft.
    """
    return chunk_tokens + max_draft_tokens


def fitting_budget(budget: int, chunk_tokens: int, context_tokens: int) -> int:
    """Return the budget limited to the chunks of the context, but at least two chunks."""
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
    """Return the device bytes of a retrieval cache, in 8 bits if `rounded`, with its scores and its
    table of chosen chunks.
    """
    budget = fitting_budget(budget, chunk_tokens, context_tokens)
    tokens = budget + own_tokens(chunk_tokens, max_draft_tokens)
    chosen = chosen_bytes(shape, budget // chunk_tokens)
    kept = rounded_bytes(shape, tokens) if rounded else dense_bytes(shape, tokens)
    return kept + scores_bytes(shape, chunk_tokens, context_tokens) + chosen


def chosen_bytes(shape: KVShape, slots: int) -> int:
    """Return the device bytes of the table of the chunk in each slot of a retrieval cache."""
    return shape.layers * shape.kv_heads * slots * 8
