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
            self._config = LlamaConfig(
                hidden_size=config.heads * config.head_dim,  # all that rope wants of it
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

    def cos_sin(
        self, start: int | torch.Tensor, tokens: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, head_dim] each, in the dtype and on the device of `like`.

        start: a number, or [1] int64 on the device where frequencies do not depend on the length.

        Dynamic frequencies depend on the length of the text. Tokens from position 0 on are a
        prompt, which has one length; each later token sees the text that ends with it, as in plain
        decoding, however many of them come at once and whatever was drafted before.
        """
        positions = torch.arange(tokens, device=like.device) + start
        if not self.depends_on_length or start + tokens <= self._unscaled:
            cos, sin = self._module(like, positions[None])
            return cos[0], sin[0]
        lengths = [tokens] if start == 0 else range(start + 1, start + tokens + 1)
        angles = positions[:, None] * torch.stack([self._frequencies(n) for n in lengths])
        angles = torch.cat((angles, angles), -1)
        scaling = self._module.attention_scaling
        return (angles.cos() * scaling).to(like.dtype), (angles.sin() * scaling).to(like.dtype)

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
