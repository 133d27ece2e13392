"""Which tensors a model has, and how they lie side by side. No tensors are made here."""

from __future__ import annotations

from collections.abc import Mapping

from offload.formats import Dense, ElementType
from offload.kv.shape import KVShape
from offload.layouts import FlatLayout
from triforce_core.model.config import ModelConfig


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
    return _dense(layer_shapes(config), dtype)


def head_layout(config: ModelConfig, dtype: ElementType) -> FlatLayout:
    return _dense({"norm": (config.hidden,), "head": (config.vocab, config.hidden)}, dtype)


def embedding_layout(config: ModelConfig, dtype: ElementType) -> FlatLayout:
    return _dense({"embedding": (config.vocab, config.hidden)}, dtype)


def _dense(shapes: Mapping[str, tuple[int, ...]], dtype: ElementType) -> FlatLayout:
    return FlatLayout.of({name: Dense(shape, dtype) for name, shape in shapes.items()})


def kv_shape(config: ModelConfig, block_tokens: int, dtype: ElementType) -> KVShape:
    return KVShape(config.layers, config.kv_heads, config.head_dim, block_tokens, dtype)
