"""Rotary position embedding, by transformers' own module so that no variant drifts from it."""

from __future__ import annotations

import torch

from offload.errors import CheckpointError

from .config import ModelConfig


class Rope:
    """cos and sin of positions, for every rope type of config.ROPE_TYPES."""

    def __init__(
        self, config: ModelConfig, device: torch.device, factors: torch.Tensor | None
    ) -> None:
        """factors: divisors of the inverse frequencies, [head_dim / 2], or None."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        parameters = {"rope_type": config.rope.type, "rope_theta": config.rope.theta}

        def make() -> torch.nn.Module:
            module = LlamaRotaryEmbedding(
                LlamaConfig(
                    hidden_size=config.heads * config.head_dim,  # all that rope wants of it
                    num_attention_heads=config.heads,
                    num_key_value_heads=config.kv_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.trained_positions,
                    rope_parameters=parameters | dict(config.rope.parameters),
                )
            ).to(device)
            if factors is not None:
                module.inv_freq.div_(factors.to(device))
            return module

        self._make = make
        try:
            self._module = make()
        except Exception as error:
            raise CheckpointError(f"rope of type {config.rope.type}: {error}") from error
        self._dynamic = config.rope.type == "dynamic"

    def reset(self) -> None:
        """Forgets the lengths seen: dynamic scaling grows with a text and starts anew with it."""
        if self._dynamic:
            self._module = self._make()

    def cos_sin(
        self, start: int, tokens: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, head_dim] each, in the dtype and on the device of `like`."""
        positions = torch.arange(start, start + tokens, device=like.device)[None]
        cos, sin = self._module(like, positions)
        return cos[0], sin[0]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [heads, tokens, head_dim], its first half paired with its second half."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin
