"""Specifications of layers: the mixer, the MLP, and the shapes of their tensors.

No tensors are created here. Each kind of mixer or MLP is a class in this module, and its
computation is in `mixers` or `mlps`.
"""

from __future__ import annotations

from dataclasses import dataclass

from triforce_offload.errors import CheckpointError

_MAX_HEAD_DIM = 1024

# Shapes of a layer's tensors by name, in the order in which they are used.
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Attention:
    """Full attention: each token attends to itself and to every token before it.

    heads: number of query heads
    kv_heads: number of key-value heads; a group of query heads shares each
    head_dim: size of a head
    qkv_bias: whether queries, keys and values have a bias
    output_bias: whether the output has a bias
    qk_norm: whether queries and keys are normalised, each head separately
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        """Raise CheckpointError if the numbers of heads or their size are impossible."""
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads"
            )
        if self.head_dim % 2 or self.head_dim > _MAX_HEAD_DIM:
            raise CheckpointError(
                f"head_dim {self.head_dim} is not an even number up to {_MAX_HEAD_DIM}"
            )

    @property
    def queries(self) -> int:
        """Number of columns of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Number of columns of all key heads; all value heads have as many."""
        return self.kv_heads * self.head_dim

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the mixer's tensors. hidden: width of the model"""
        qkv = self.queries + 2 * self.keys
        shapes: Shapes = {"qkv": (qkv, hidden)}
        if self.qkv_bias:
            shapes["qkv_bias"] = (qkv,)
        if self.qk_norm:
            shapes["q_norm"] = shapes["k_norm"] = (self.head_dim,)
        shapes["o"] = (hidden, self.queries)
        if self.output_bias:
            shapes["o_bias"] = (hidden,)
        return shapes


@dataclass(frozen=True)
class DenseMLP:
    """SwiGLU (Shazeer, 2020) over every token.

    width: number of columns of the gate, and of the up projection
    """

    width: int

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the MLP's tensors. hidden: width of the model"""
        return {"gate_up": (2 * self.width, hidden), "down": (hidden, self.width)}


@dataclass(frozen=True)
class LayerSpec:
    """A layer: a mixer and an MLP, each with an RMS norm before it and a residual connection."""

    mixer: Attention
    mlp: DenseMLP

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the layer's tensors, in the order in which they are used.

        hidden: width of the model
        """
        return {
            "input_norm": (hidden,),
            **self.mixer.shapes(hidden),
            "post_norm": (hidden,),
            **self.mlp.shapes(hidden),
        }
