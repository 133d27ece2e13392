"""Rotary position embedding. Scaled frequencies come from transformers, so they agree with it."""

from __future__ import annotations

import math
from typing import Any

import torch

from triforce_core.model.config import ModelConfig, RopeConfig, RotationKind
from triforce_kernels.layer import rotate
from triforce_offload.errors import CheckpointError
from triforce_offload.link.waiting import come

# Cosines and sines, [rows, head_dim] each.
Rotation = tuple[torch.Tensor, torch.Tensor]


class Rope:
    """Cosines and sines of positions, for every rope type in config.ROPE_TYPES."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        factors: torch.Tensor | None,
        context: int,
    ) -> None:
        """factors: divisors of the inverse frequencies of `config.rope`, [head_dim / 2], or None
        context: maximum number of tokens of a sequence; longrope has other frequencies if it is
            longer than the model was first trained on, as in vLLM and llama.cpp
        """
        self._tables: dict[RotationKind, _Table | None] = {}
        for kind in config.rotations:
            rope = kind[0]
            own = factors if rope == config.rope else None
            self._tables[kind] = rope and _Table(config, kind, device, own, context)
        self._of_layers = [
            config.rotation_of(config.layers[layer].mixer) for layer in config.kv_layers
        ]
        self._query_growth = config.rope.query_growth

    @property
    def needs_host(self) -> bool:
        """Whether the host computes frequencies, from the length of the sequence."""
        return any(table.dynamic for table in self._tables.values() if table)

    def reads_alike(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` tokens is rotated like any shorter one. Only then can a
        prompt reuse the KV of a prefix.
        """
        return all(tokens <= table.unscaled for table in self._tables.values() if table)

    def rotations(
        self, positions: torch.Tensor, like: torch.Tensor
    ) -> dict[RotationKind, Rotation]:
        """Return cosines and sines for positions [rows], in the dtype of `like`, by kind. Those of
        layers without a rotary embedding rotate nothing.
        """
        return {
            kind: table.rotation(positions, like) if table else _identity(positions, like, kind[1])
            for kind, table in self._tables.items()
        }

    def rotation_of(
        self, kind: RotationKind, positions: torch.Tensor, like: torch.Tensor
    ) -> Rotation:
        """Return cosines and sines of one kind, as `rotations` does."""
        return self._tables[kind].rotation(positions, like)

    def query_scale(self, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """Return factors of the queries at positions [rows], in the dtype of `like`, or None.

        They grow with the position (Llama 4, Ministral 3), so that attention over many tokens stays
        as sharp.
        """
        if self._query_growth is None:
            return None
        beta, original = self._query_growth
        return (1 + beta * torch.log(1 + (positions / original).floor())).to(like.dtype)

    def turned_back(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Move rotated keys [layers, ..., head_dim] to positions that are `by` tokens earlier.

        Rotations add up, so this is one more rotation. It does not change the scale of the keys.
        Keys of layers that do not rotate stay as they are.
        """
        turned = keys.clone()
        for layer, kind in zip(range(len(keys)), self._of_layers, strict=False):
            if table := self._tables[kind]:
                turned[layer] = table.turned_back(keys[layer], by)
        return turned


def _identity(positions: torch.Tensor, like: torch.Tensor, head_dim: int) -> Rotation:
    ones = like.new_ones(len(positions), head_dim)
    return ones, torch.zeros_like(ones)


class _Table:
    """Cosines and sines of one rotary embedding.

    dynamic: whether frequencies depend on the length of the sequence
    unscaled: up to how many tokens they do not
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: tuple[RopeConfig, int],
        device: torch.device,
        factors: torch.Tensor | None,
        context: int,
    ) -> None:
        rope, head_dim = kind
        self._config, inverse, scaling = _frequencies(config, rope, head_dim, context)
        self._inverse = _for_whole_heads(inverse, head_dim).to(device)
        # Pairs that stay as they are are not scaled either.
        self._scaling: float | torch.Tensor = scaling
        if len(inverse) < len(self._inverse) and scaling != 1:
            each = torch.ones_like(self._inverse)
            each[: len(inverse)] = scaling
            self._scaling = torch.cat((each, each))
        if factors is not None:
            self._inverse.div_(factors.to(device))
        self.dynamic = rope.type == "dynamic"
        self.unscaled = config.trained_positions if self.dynamic else math.inf

    def rotation(self, positions: torch.Tensor, like: torch.Tensor) -> Rotation:
        """Return cosines and sines for positions [rows]: [rows, head_dim] each, in the dtype of
        `like`.

        Dynamic frequencies depend on the length of the sequence. Rows that start at position 0 are
        a prompt, and all use the length of the prompt. Each later token uses the length of the
        sequence that ends with it, as in plain decoding, whatever the number of rows and the drafts
        before it.
        """
        # An elementwise product: a matrix product may round to TF32.
        angles = positions.unsqueeze(1).float() * self._frequencies_at(positions)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return cos.to(like.dtype), sin.to(like.dtype)

    def _frequencies_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return inverse frequencies, [head_dim / 2], or [rows, head_dim / 2] if rows differ."""
        if not self.dynamic:
            return self._inverse
        known = come(positions).tolist()
        if max(known) < self.unscaled:
            return self._inverse
        lengths = [max(known) + 1] if known[0] == 0 else [place + 1 for place in known]
        return torch.stack([self._dynamic_at(length) for length in lengths])

    def _dynamic_at(self, length: int) -> torch.Tensor:
        """Return dynamic inverse frequencies [head_dim / 2] for a sequence of `length` tokens."""
        inverse, _ = _of_transformers(self._config, "dynamic", length)
        return _for_whole_heads(inverse, 2 * len(self._inverse)).to(self._inverse.device)

    def turned_back(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Return the keys of a layer [..., head_dim] at positions that are `by` tokens earlier."""
        angles = self._inverse.float() * by
        angles = torch.cat((angles, angles))
        return rotate(keys, angles.cos().to(keys.dtype), -angles.sin().to(keys.dtype))


def _for_whole_heads(inverse: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return inverse frequencies of all pairs of a head, [head_dim / 2], from those of its rotated
    part.

    A frequency of 0 leaves a pair as it is. Of heads that are rotated in part, the checkpoint's
    rows are read in an order in which the rotated pairs come first in each half.
    """
    return torch.nn.functional.pad(inverse, (0, head_dim // 2 - len(inverse)))


def _frequencies(
    config: ModelConfig, rope: RopeConfig, head_dim: int, context: int
) -> tuple[Any, torch.Tensor, float]:
    """Return transformers' config or None, the inverse frequencies of what is rotated, and the
    scale of cosines and sines. Raises CheckpointError.
    """
    if rope.type == "default":
        # transformers has no function for this type outside its models.
        rotated = rope.rotated(head_dim)
        powers = torch.arange(0, rotated, 2, dtype=torch.float) / rotated
        return None, 1.0 / rope.theta**powers, 1.0
    # Do not import a model's module of transformers: that takes seconds.
    from transformers import PreTrainedConfig

    theirs = PreTrainedConfig()
    parameters = dict(rope.parameters)
    if rope.type != "proportional":
        # What is rotated is a head of its own: its share of a head, times its size, may be rounded.
        head_dim = rope.rotated(head_dim)
        parameters.pop("partial_rotary_factor", None)
    # Rope only divides the hidden size by the number of heads, so set it to match head_dim.
    theirs.hidden_size = theirs.head_dim = head_dim
    theirs.num_attention_heads = 1
    theirs.max_position_embeddings = config.trained_positions
    named = {"rope_type": rope.type, "rope_theta": rope.theta}
    theirs.rope_parameters = named | parameters
    theirs.rope_parameters.pop("llama_4_scaling_beta", None)
    try:
        theirs.standardize_rope_params()
        theirs.validate_rope()
        length = context if rope.type == "longrope" else None
        return theirs, *_of_transformers(theirs, rope.type, length)
    except Exception as error:
        raise CheckpointError(f"rope of type {rope.type}: {error}") from error


def _of_transformers(config: Any, kind: str, length: int | None) -> tuple[torch.Tensor, float]:
    """Return transformers' inverse frequencies for a sequence of `length` tokens, and its scale."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)
