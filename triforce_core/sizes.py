"""Which tensors a model has, and how many bytes its parts take. No tensors are made here."""

from __future__ import annotations

from offload.layout import FlatLayout
from offload.shape import ElementType, KVShape
from offload.sizes import dense_bytes, reader_bytes, scores_bytes

from .config import ModelConfig

LAW_ROWS = 16
"""Rows of logits that `laws` turns into laws at a time."""
LONGEST_RECORDED = 32
"""Tokens of the longest forward that is recorded as a graph."""
SINKS = 16
WINDOW = 256
"""Tokens that a small model which drafts attends to: the first of a text, and the recent ones."""


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, in the order they are used."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (config.hidden,),
        "qkv": (queries + 2 * keys, config.hidden),
    }
    if config.qkv_bias:
        shapes["qkv_bias"] = (queries + 2 * keys,)
    if config.qk_norm:
        shapes["q_norm"] = shapes["k_norm"] = (config.head_dim,)
    shapes["o"] = (config.hidden, queries)
    if config.output_bias:
        shapes["o_bias"] = (config.hidden,)
    shapes["post_norm"] = (config.hidden,)
    shapes["gate_up"] = (2 * config.mlp, config.hidden)
    shapes["down"] = (config.hidden, config.mlp)
    return shapes


def matrices(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Shapes of a layer's matrices."""
    return tuple((s[0], s[1]) for s in layer_shapes(config).values() if len(s) == 2)


def layer_layout(config: ModelConfig, dtype: ElementType) -> FlatLayout:
    return FlatLayout.of(layer_shapes(config), dtype)


def head_layout(config: ModelConfig, dtype: ElementType) -> FlatLayout:
    return FlatLayout.of({"norm": (config.hidden,), "head": (config.vocab, config.hidden)}, dtype)


def embedding_layout(config: ModelConfig, dtype: ElementType) -> FlatLayout:
    return FlatLayout.of({"embedding": (config.vocab, config.hidden)}, dtype)


def kv_shape(config: ModelConfig, block_tokens: int, dtype: ElementType) -> KVShape:
    return KVShape(config.layers, config.kv_heads, config.head_dim, block_tokens, dtype)


def window_tokens(config: ModelConfig, max_draft_tokens: int) -> int:
    """Capacity of a small model's cache: sinks, window, and room to draft and to slide rarely."""
    return min(config.trained_positions, SINKS + WINDOW + 2 * (max_draft_tokens + 1))


def small_model_shape(config: ModelConfig, like: KVShape) -> KVShape:
    return kv_shape(config, 1, like.dtype)


def small_model_parts_bytes(config: ModelConfig, like: KVShape, max_draft_tokens: int) -> int:
    """Device bytes of a small model that drafts and of its window, without its temporaries."""
    ends = head_layout(config, like.dtype).nbytes
    if not config.tied:
        ends += embedding_layout(config, like.dtype).nbytes
    window = dense_bytes(small_model_shape(config, like), window_tokens(config, max_draft_tokens))
    return ends + config.layers * layer_layout(config, like.dtype).nbytes + window


def own_tokens(chunk_tokens: int, max_draft_tokens: int) -> int:
    """Tokens of a retrieval cache besides its budget: a chunk that fills, the last token and a
    draft.
    """
    return chunk_tokens + max_draft_tokens


def fitting_budget(budget: int, chunk_tokens: int, context_tokens: int) -> int:
    """A budget without the part that the context could never fill."""
    return min(budget, max(2, -(-context_tokens // chunk_tokens)) * chunk_tokens)


def retrieval_bytes(
    shape: KVShape, budget: int, chunk_tokens: int, max_draft_tokens: int, context_tokens: int
) -> int:
    """Device bytes of a retrieval cache, of what fills it and of what it is chosen by."""
    budget = fitting_budget(budget, chunk_tokens, context_tokens)
    tokens = budget + own_tokens(chunk_tokens, max_draft_tokens)
    return (
        dense_bytes(shape, tokens)
        + reader_bytes(shape, budget)
        + scores_bytes(shape, chunk_tokens, context_tokens)
    )
