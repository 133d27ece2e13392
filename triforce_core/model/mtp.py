"""MTP heads: one more layer of a model, which predicts the token after the next one.

A head joins a token's embedding with the model's last hidden state at the token before. Embedding
and output matrix are the model's own (DeepSeek-V3, 2024; transformers' `MtpModel`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from triforce_core.model.checkpoints.pieces import Piece
from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import LayerSpec

if TYPE_CHECKING:
    from triforce_kernels.weights.linear import Weight

# How Qwen's checkpoints name the tensors of a head, but for those of its layer.
_PREFIX = "mtp."
_JOINS = {
    "token_norm": "pre_fc_norm_embedding.weight",
    "state_norm": "pre_fc_norm_hidden.weight",
    "join": "fc.weight",
}


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Return the config of a model's MTP head: a full-attention layer like the model's own."""
    spec: LayerSpec = config.layers[config.kv_layers[0]]
    return replace(config, layers=(replace(spec, joins=True),))


def publishes_head(config: ModelConfig) -> bool:
    """Whether published safetensors files of this family have a head."""
    return config.family == "qwen3_5_text"


def has_head(names: frozenset[str]) -> bool:
    """Whether tensors of these names are those of a head with one layer."""
    return f"{_PREFIX}fc.weight" in names and f"{_PREFIX}layers.1.mlp.down_proj.weight" not in names


def head_pieces(
    of_layer: Callable[[str], list[Piece]], prefix: str, hidden: int
) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor of a head.

    of_layer: returns the pieces of a tensor of a full-attention layer of the model, by its name
    prefix: what the names of that layer's tensors begin with
    """

    def pieces(name: str) -> list[Piece]:
        part = name.split(".")[-1]
        if name == "norm":
            return [Piece(f"{_PREFIX}norm.weight", hidden)]
        if part in _JOINS:
            return [Piece(_PREFIX + _JOINS[part], hidden)]
        return [
            replace(piece, name=f"{_PREFIX}layers.0.{piece.name.removeprefix(prefix)}")
            for piece in of_layer(part)
        ]

    return pieces


class Whole(Protocol):
    """The checkpoint of a model and its head."""

    config: ModelConfig

    def read_pieces(self, name: str, pieces: Sequence[Piece], into: Weight) -> None: ...


class MtpHead:
    """The MTP head of a checkpoint, as a checkpoint of its own. See `Readable`."""

    def __init__(self, whole: Whole, pieces: Callable[[str], list[Piece]]) -> None:
        """pieces: see `head_pieces`"""
        self.config = mtp_config(whole.config)
        self._whole = whole
        self._pieces = pieces

    def read_layer(self, layer: int, views: Mapping[str, Weight]) -> None:
        """Read every tensor of the layer. Raises CheckpointError."""
        for part, view in views.items():
            self.read(part, view)

    def read(self, name: str, into: Weight) -> None:
        """Read `norm`, or a tensor of the layer. Raises CheckpointError."""
        self._whole.read_pieces(name, self._pieces(name), into)
