"""Specifications of mixers that keep a state of a text instead of its KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from triforce_core.model.feed_forward import Described, Shapes
from triforce_core.model.parts.specs import Keeps
from triforce_offload.errors import CheckpointError


@dataclass(frozen=True)
class LinearAttention:
    """A short convolution of queries, keys and values, and a recurrence over them
    (`triforce_kernels/recurrent/delta`).

    "decay" is the factor of what the decays go through, below 0.

    key_heads: number of query and key heads; a group of value heads shares each
    value_heads: number of value heads, each with a state
    key_dim, value_dim: sizes of the heads
    taps: number of tokens that the convolution sees, a token's own included
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    keeps: ClassVar[Keeps] = Keeps.STATE

    def __post_init__(self) -> None:
        """Raise CheckpointError if the numbers of heads are impossible."""
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads"
            )

    @property
    def keys(self) -> int:
        """Number of columns of all key heads; all query heads have as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of columns of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, repr=False)
class DeltaNet(LinearAttention, Described):
    """Gated DeltaNet (Yang et al., 2025): linear attention by the gated delta rule.

    The first matrix, "qkv", projects queries, keys, values, output gates, rates and decays.

    tiled_output: whether the columns of "o" are in the order of GGUF files: the first value head of
        every key head, then the second of every one, ...
    sigmoid_gate: whether outputs are multiplied by the sigmoid of their gates, not by SiLU
    """

    _NEWER = frozenset({"sigmoid_gate"})

    tiled_output: bool = False
    sigmoid_gate: bool = False

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the mixer's tensors. hidden: width of the model"""
        return {
            "qkv": (self.channels + self.values + 2 * self.value_heads, hidden),
            "conv": (self.channels, 1, self.taps),
            "decay": (self.value_heads,),
            "decay_bias": (self.value_heads,),
            "head_norm": (self.value_dim,),
            "o": (hidden, self.values),
        }


@dataclass(frozen=True)
class Mamba2(LinearAttention):
    """Mamba-2 (Dao and Gu, 2024), whose inputs x, B and C are values, keys and queries, and whose
    groups are key heads.

    The first matrix, "qkv", projects queries, keys, values, output gates and steps, which are rates
    and give decays. "skip" is the factor of the values that are added to the output. "head_norm"
    norms what the gates leave of a group of heads.

    conv_bias: whether the convolution has a bias
    divided_group: whether ranks divide the only group, and its norm needs the sums of all
    """

    conv_bias: bool = True
    divided_group: bool = field(default=False, repr=False)

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the mixer's tensors. hidden: width of the model"""
        heads = (self.value_heads,)
        return {
            "qkv": (self.channels + self.values + self.value_heads, hidden),
            "conv": (self.channels, 1, self.taps),
            **({"conv_bias": (self.channels,)} if self.conv_bias else {}),
            **{"decay": heads, "decay_bias": heads, "skip": heads},
            "head_norm": (self.values,),
            "o": (hidden, self.values),
        }


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution (LFM2; Liquid AI, 2025): of three projections, the product of the
    first and the third is convolved and multiplied by the second.

    channels: number of columns of each projection
    taps: as in LinearAttention
    bias: whether the projections and the convolution have a bias
    """

    channels: int
    taps: int
    bias: bool = False
    keeps: ClassVar[Keeps] = Keeps.STATE

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the mixer's tensors. hidden: width of the model"""
        shapes: Shapes = {
            "qkv": (3 * self.channels, hidden),
            "qkv_bias": (3 * self.channels,),
            "conv": (self.channels, 1, self.taps),
            "conv_bias": (self.channels,),
            "o": (hidden, self.channels),
            "o_bias": (hidden,),
        }
        return {name: s for name, s in shapes.items() if self.bias or not name.endswith("_bias")}
