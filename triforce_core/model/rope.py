"""Rotary position embedding, by transformers' own module so that no variant drifts from it."""

from __future__ import annotations

import math

import torch
from triforce_kernels.layer import rotate

from offload.errors import CheckpointError
from triforce_core.model.config import ModelConfig


class Rope:
    """cos and sin of positions, for every rope type of config.ROPE_TYPES."""

    def __init__(
        self, config: ModelConfig, device: torch.device, factors: torch.Tensor | None
    ) -> None:
        """factors: divisors of the inverse frequencies, [head_dim / 2], or None."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        parameters = {"rope_type": config.rope.type, "rope_theta": config.rope.theta}

        try:
            # The hidden size is that of the heads: rope wants it for nothing else.
            self._config = LlamaConfig(
                hidden_size=config.heads * config.head_dim,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.trained_positions,
                rope_parameters=parameters | dict(config.rope.parameters),
            )
            self._module = LlamaRotaryEmbedding(self._config).to(device)
        except Exception as error:
            raise CheckpointError(f"rope of type {config.rope.type}: {error}") from error
        if factors is not None:
            self._module.inv_freq.div_(factors.to(device))
        dynamic = config.rope.type == "dynamic"
        self._unscaled = config.trained_positions if dynamic else math.inf

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies depend on the length of the text."""
        return self._unscaled != math.inf

    def reads_alike(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens is rotated as any shorter one: then a text may keep
        what was computed for its beginning.
        """
        return tokens <= self._unscaled

    def rotation(
        self, positions: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions [rows], [rows, head_dim] each, in the dtype of `like`.

        Dynamic frequencies depend on the length of the text. Tokens from position 0 on are a
        prompt, which has one length; each later token sees the text that ends with it, as in plain
        decoding, however many of them come at once and whatever was drafted before.
        """
        # Multiplied element by element: a matrix product may round to TF32.
        angles = positions.unsqueeze(1).float() * self._frequencies_at(positions)
        angles = torch.cat((angles, angles), -1)
        scaling = self._module.attention_scaling
        return (angles.cos() * scaling).to(like.dtype), (angles.sin() * scaling).to(like.dtype)

    def _frequencies_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Inverse frequencies, [head_dim / 2], or [rows, head_dim / 2] where rows differ."""
        if not self.depends_on_length:
            return self._module.inv_freq
        known = positions.tolist()
        if max(known) < self._unscaled:
            return self._module.inv_freq
        lengths = [max(known) + 1] if known[0] == 0 else [place + 1 for place in known]
        return torch.stack([self._frequencies(length) for length in lengths])

    def _frequencies(self, length: int) -> torch.Tensor:
        """Dynamic inverse frequencies in a text of `length` tokens, [head_dim / 2]."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        device = self._module.inv_freq.device
        return ROPE_INIT_FUNCTIONS["dynamic"](self._config, device, seq_len=length)[0]

    def turned_back(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Rotated keys [..., head_dim] as if their tokens stood `by` positions earlier.

        Rotations add up, so the difference is one more rotation; it scales nothing.
        """
        angles = self._module.inv_freq.float() * by
        angles = torch.cat((angles, angles))
        return rotate(keys, angles.cos().to(keys.dtype), -angles.sin().to(keys.dtype))
