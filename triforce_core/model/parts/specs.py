"""Specifications of what only some models have beside mixers and MLPs: residual streams, n-gram
embeddings and an index of keys (Qwen4; Qwen3.8-Flash-Next, 2026), and per-layer embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triforce_core.model.feed_forward import Shapes


class Keeps(Enum):
    """What a mixer keeps of a text: the KV of all its tokens, that of the last ones, or a state."""

    KV = "kv"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class Streams:
    """Several residual streams (hyper-connections; Zhu et al., 2024): a mixer or an MLP takes a
    gated mean of them, and adds its output to each with a weight of its own. Gates and weights are
    computed from all streams, the gates through a narrow vector.

    count: number of streams, each as wide as the model
    rank: length of the narrow vector
    """

    count: int
    rank: int

    def shapes(self, hidden: int, part: str) -> Shapes:
        """Return the shapes of the tensors around a mixer or an MLP. part: with what their names
        begin
        """
        return self.of_mean(hidden, part) | {f"{part}_inject": (self.count, self.count * hidden)}

    def of_mean(self, hidden: int, part: str) -> Shapes:
        """Return the shapes of the tensors of a gated mean alone."""
        wide = self.count * hidden
        return {
            f"{part}_mix_norm": (wide,),
            f"{part}_mix_down": (self.rank, wide),
            f"{part}_mix_up": (wide, self.rank),
        }


@dataclass(frozen=True)
class NGrams:
    """Embeddings of the last tokens, added to all residual streams before a layer: each of several
    heads looks the row of a hash of the last two tokens up, or of the last three, ... They give a
    key for each stream, whose product with the stream gates a value. A short convolution over every
    third token, if the longest n-grams have three, follows.

    sizes: number of rows of each head's table, one after the other in one table
    multipliers: factor of each token in the hash, the last token's first
    width: numbers of a row
    taps: number of tokens that the convolution sees
    end: token that separates texts
    streams: number of residual streams
    """

    sizes: tuple[int, ...]
    multipliers: tuple[int, ...]
    width: int
    taps: int
    end: int
    streams: int

    @property
    def before(self) -> int:
        """Number of tokens before a row whose embeddings are looked up with its own."""
        return len(self.multipliers) - 1

    @property
    def columns(self) -> int:
        """Numbers that all heads give a token."""
        return len(self.sizes) * self.width

    @property
    def seen(self) -> int:
        """Number of tokens that the convolution reaches, a row's own included."""
        return (self.taps - 1) * len(self.multipliers) + 1

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the tensors in the layer; the table is apart."""
        wide = self.streams * hidden
        return {
            "ngram_keys": (wide, self.columns),
            "ngram_values": (hidden, self.columns),
            "ngram_key_norm": (wide,),
            "ngram_query_norm": (wide,),
            "ngram_conv_norm": (wide,),
            "ngram_conv": (wide, 1, self.taps),
        }


@dataclass(frozen=True)
class PerLayerInputs:
    """Per-layer embeddings (Gemma 3n, 2025, and Gemma 4): for each layer a token has a row of a
    table, to which a projection of its embedding is added. A projection of the hidden states gates
    their sum, and a projection of the result is added after the MLP.

    width: numbers of a row in each layer
    """

    width: int

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the tensors in a layer; the table is apart."""
        return {
            "per_layer_mix": (self.width, hidden),
            "per_layer_mix_norm": (self.width,),
            "per_layer_gate": (self.width, hidden),
            "per_layer_up": (hidden, self.width),
            "per_layer_norm": (hidden,),
        }


@dataclass(frozen=True)
class Indexer:
    """An index of keys, by which each token chooses the keys that it attends to (QSA, Qwen4): whole
    blocks of neighbouring tokens, and the last tokens that fill no block. A block has one vector,
    the mean of its tokens'; its score is the sum over heads of what the products with a token's
    queries are above 0.

    heads: number of queries
    dim: length of queries and vectors
    budget: number of tokens of the chosen blocks
    block: tokens of a block
    """

    heads: int
    dim: int
    budget: int
    block: int

    @property
    def rows(self) -> int:
        """Rows of the projection: of the queries, and of a token's own vector."""
        return (self.heads + 1) * self.dim

    @property
    def all_seen(self) -> int:
        """Most tokens of which a token sees all."""
        return self.budget + self.block - 1
