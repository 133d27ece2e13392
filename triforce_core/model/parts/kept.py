"""The geometry of what a sequence keeps for a model. Sizes need no tensors."""

from __future__ import annotations

from triforce_core.model.config import ModelConfig
from triforce_core.model.parts.recurrent import LinearAttention, ShortConv
from triforce_offload.kv.index.shape import IndexShape
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.states.shape import NGramShape, StateShape
from triforce_offload.kv.windows.shape import WindowShape
from triforce_offload.weights.formats import ElementType


def kv_shape(config: ModelConfig, block_tokens: int, dtype: ElementType) -> KVShape:
    """Return the KV shape of the full-attention layers."""
    heads = config.attention
    layers, sides = len(config.kv_layers), heads.sides
    return KVShape(layers, heads.kv_heads, heads.head_dim, block_tokens, dtype, sides=sides)


def window_shape(config: ModelConfig, tokens: int, dtype: ElementType) -> WindowShape | None:
    """Return the KV shape of the layers with a window, None if there are none.

    tokens: number of tokens of the longest sequence
    """
    if (mixer := config.windowed) is None:
        return None
    layers = len(config.window_layers)
    return WindowShape(layers, mixer.kv_heads, mixer.head_dim, mixer.window, dtype, tokens)


def ngram_shape(config: ModelConfig, dtype: ElementType) -> NGramShape | None:
    """Return the shape of what the convolution behind n-gram embeddings keeps, None without any."""
    if (ngrams := config.ngrams) is None:
        return None
    return NGramShape(1, config.width, ngrams.seen, dtype)


def index_shape(config: ModelConfig, tokens: int, dtype: ElementType) -> IndexShape | None:
    """Return the shape of the index of keys, None without one. tokens: of the longest sequence"""
    if (index := config.attention.index) is None:
        return None
    return IndexShape(len(config.kv_layers), index.dim, index.block, dtype, tokens)


def state_shape(config: ModelConfig, dtype: ElementType) -> StateShape | None:
    """Return the shape of the states of recurrent layers, None if there are none."""
    layers = len(config.recurrent_layers)
    match config.recurrent:
        case LinearAttention() as mixer:
            heads = mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim
            return StateShape(layers, mixer.channels, mixer.taps, dtype, *heads)
        case ShortConv() as mixer:
            return StateShape(layers, mixer.channels, mixer.taps, dtype)
        case _:
            return None
