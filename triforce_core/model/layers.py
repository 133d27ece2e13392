"""What each layer of a model computes: its mixer, its MLP, and the tensors they have.

No tensors are made here. A new kind of mixer or MLP is a class in this module, beside the module
that computes it (`mixers`, `mlps`).
"""

from __future__ import annotations

from dataclasses import dataclass

from triforce_offload.errors import CheckpointError

_MAX_HEAD_DIM = 1024

# Tensors of a part of a layer by their names, in the order they are used.
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Attention:
    """Full attention: each token attends to itself and to every token before it.

    heads: query heads; groups of them share each of kv_heads
    head_dim: numbers of a head
    qkv_bias, output_bias: whether queries, keys and values have a bias, and whether the output has
    qk_norm: whether queries and keys are normalised, each head by itself
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        """Raise CheckpointError for numbers that no attention can have."""
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
        """Columns of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Columns of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    def shapes(self, hidden: int) -> Shapes:
        """hidden: width of the model."""
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
    """SwiGLU (Shazeer, 2020) over every token. width: columns of its gate, and of its up part."""

    width: int

    def shapes(self, hidden: int) -> Shapes:
        """hidden: width of the model."""
        return {"gate_up": (2 * self.width, hidden), "down": (hidden, self.width)}


@dataclass(frozen=True)
class LayerSpec:
    """A layer: a mixer and an MLP, each behind an RMS norm and added to its input."""

    mixer: Attention
    mlp: DenseMLP

    def shapes(self, hidden: int) -> Shapes:
        """The layer's tensors, in the order they are used. hidden: width of the model."""
        return {
            "input_norm": (hidden,),
            **self.mixer.shapes(hidden),
            "post_norm": (hidden,),
            **self.mlp.shapes(hidden),
        }
