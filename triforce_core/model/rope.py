"""Rotary position embedding. Scaled frequencies come from transformers, so they agree with it."""

from __future__ import annotations

import math
from typing import Any

import torch

from triforce_core.model.config import ModelConfig
from triforce_kernels.layer import rotate
from triforce_offload.errors import CheckpointError
from triforce_offload.link.waiting import come


class Rope:
    """Cosines and sines of positions, for every rope type in config.ROPE_TYPES."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        factors: torch.Tensor | None,
        context: int,
    ) -> None:
        """factors: divisors of the inverse frequencies, [head_dim / 2], or None
        context: maximum number of tokens of a sequence; longrope has other frequencies if it is
            longer than the model was first trained on, as in vLLM and llama.cpp
        """
        layers = (config.layers[layer].mixer for layer in config.kv_layers)
        self._still_layers = [i for i, mixer in enumerate(layers) if not mixer.rotated]
        self._config, inverse, scaling = _frequencies(config, context)
        self._inverse = _for_whole_heads(inverse, config.attention.head_dim).to(device)
        # Pairs that stay as they are are not scaled either.
        self._scaling: float | torch.Tensor = scaling
        if len(inverse) < len(self._inverse) and scaling != 1:
            each = torch.ones_like(self._inverse)
            each[: len(inverse)] = scaling
            self._scaling = torch.cat((each, each))
        if factors is not None:
            self._inverse.div_(factors.to(device))
        self._dynamic = config.rope.type == "dynamic"
        self._unscaled = config.trained_positions if self._dynamic else math.inf
        self._query_growth = config.rope.query_growth

    @property
    def needs_host(self) -> bool:
        """Whether the host computes frequencies, from the length of the sequence."""
        return self._dynamic

    def reads_alike(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` tokens is rotated like any shorter one. Only then can a
        prompt reuse the KV of a prefix.
        """
        return tokens <= self._unscaled

    def rotation(
        self, positions: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
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

    def identity(
        self, positions: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines that rotate nothing, shaped as those of `rotation`."""
        ones = like.new_ones(len(positions), 2 * len(self._inverse))
        return ones, torch.zeros_like(ones)

    def _frequencies_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return inverse frequencies, [head_dim / 2], or [rows, head_dim / 2] if rows differ."""
        if not self._dynamic:
            return self._inverse
        known = come(positions).tolist()
        if max(known) < self._unscaled:
            return self._inverse
        lengths = [max(known) + 1] if known[0] == 0 else [place + 1 for place in known]
        return torch.stack([self._dynamic_at(length) for length in lengths])

    def query_scale(self, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """Return factors of the queries at positions [rows], in the dtype of `like`, or None.

        They grow with the position (Llama 4, Ministral 3), so that attention over many tokens stays
        as sharp.
        """
        if self._query_growth is None:
            return None
        beta, original = self._query_growth
        return (1 + beta * torch.log(1 + (positions / original).floor())).to(like.dtype)

    def _dynamic_at(self, length: int) -> torch.Tensor:
        """Return dynamic inverse frequencies [head_dim / 2] for a sequence of `length` tokens."""
        inverse, _ = _of_transformers(self._config, "dynamic", length)
        return _for_whole_heads(inverse, 2 * len(self._inverse)).to(self._inverse.device)

    def turned_back(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Move rotated keys [layers, ..., head_dim] to positions that are `by` tokens earlier.

        Rotations add up, so this is one more rotation. It does not change the scale of the keys.
        Keys of layers that do not rotate stay as they are.
        """
        angles = self._inverse.float() * by
        angles = torch.cat((angles, angles))
        turned = rotate(keys, angles.cos().to(keys.dtype), -angles.sin().to(keys.dtype))
        for layer in self._still_layers:
            turned[layer] = keys[layer]
        return turned


def _for_whole_heads(inverse: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return inverse frequencies of all pairs of a head, [head_dim / 2], from those of its rotated
    part.

    A frequency of 0 leaves a pair as it is. Of heads that are rotated in part, the checkpoint's
    rows are read in an order in which the rotated pairs come first in each half.
    """
    return torch.nn.functional.pad(inverse, (0, head_dim // 2 - len(inverse)))


def _frequencies(config: ModelConfig, context: int) -> tuple[Any, torch.Tensor, float]:
    """Return transformers' config or None, the inverse frequencies of what is rotated, and the
    scale of cosines and sines. Raises CheckpointError.
    """
    if config.rope.type == "default":
        # transformers has no function for this type outside its models.
        rotated = config.rope.rotated(config.attention.head_dim)
        powers = torch.arange(0, rotated, 2, dtype=torch.float) / rotated
        return None, 1.0 / config.rope.theta**powers, 1.0
    # Do not import a model's module of transformers: that takes seconds.
    from transformers import PreTrainedConfig

    theirs = PreTrainedConfig()
    # Rope only divides the hidden size by the number of heads, so set it to match head_dim.
    theirs.hidden_size = config.attention.queries
    theirs.num_attention_heads = config.attention.heads
    theirs.head_dim = config.attention.head_dim
    theirs.max_position_embeddings = config.trained_positions
    named = {"rope_type": config.rope.type, "rope_theta": config.rope.theta}
    theirs.rope_parameters = named | dict(config.rope.parameters)
    theirs.rope_parameters.pop("llama_4_scaling_beta", None)
    try:
        theirs.standardize_rope_params()
        theirs.validate_rope()
        length = context if config.rope.type == "longrope" else None
        return theirs, *_of_transformers(theirs, config.rope.type, length)
    except Exception as error:
        raise CheckpointError(f"rope of type {config.rope.type}: {error}") from error


def _of_transformers(config: Any, kind: str, length: int | None) -> tuple[torch.Tensor, float]:
    """Return transformers' inverse frequencies for a sequence of `length` tokens, and its scale."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)
