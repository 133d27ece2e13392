"""The model: one definition for the Llama family, blind to where weights and KV live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from triforce_kernels.layer import rms_norm, rope_into, swiglu

from offload.kv.store import Room
from triforce_core.model.config import ModelConfig
from triforce_core.model.rope import Rope

LayerWeights = Mapping[str, torch.Tensor]


class Weights(Protocol):
    """Where a pass gets its layers from: resident, or streamed just in time."""

    def layer(self, index: int) -> AbstractContextManager[LayerWeights]:
        """The tensors of `layer_shapes`, valid inside the block. Asked for in order."""


class Cache(Protocol):
    """Where a pass keeps and attends to KV."""

    def room(self, layer: int, tokens: int) -> Room:
        """Where the keys and values of the next tokens are to be put, before `attend`."""

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of those tokens to everything before them and themselves.

        query and the result: [heads, tokens, head_dim].
        """


@dataclass(frozen=True)
class Ends:
    """What comes before the first layer and after the last.

    embedding: [vocab, hidden], on the device or in host memory
    norm: [hidden]; head: [vocab, hidden], on the device
    """

    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor


class Model:
    """Forward passes. Holds what is not a layer: embedding, norm, head and rope."""

    def __init__(self, config: ModelConfig, ends: Ends, rope: Rope, device: torch.device) -> None:
        self.config = config
        self.rope = rope
        self._ends = ends
        self._device = device

    @property
    def recordable(self) -> bool:
        """Whether a forward can be recorded as a graph: nothing in it is computed by the host."""
        return not self.rope.depends_on_length and self._ends.embedding.device == self._device

    def forward(
        self,
        token_ids: torch.Tensor,
        start: int | torch.Tensor,
        weights: Weights,
        cache: Cache,
        *,
        chunk: int | None = None,
        each_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """One pass over tokens at positions start, start + 1, ...

        token_ids: [tokens] int64. start: a number, or [1] int64 on the device. chunk: tokens of a
        layer computed at a time, None for all; each layer is asked for once either way. each_layer
        is called after each layer with its index.
        Returns hidden states before the final norm, [tokens, hidden].
        """
        embedding = self._ends.embedding
        hidden = F.embedding(token_ids.to(embedding.device), embedding).to(self._device)
        tokens = hidden.shape[0]
        cos, sin = self.rope.cos_sin(start, tokens, hidden)
        step = chunk or tokens
        for index in range(self.config.layers):
            with weights.layer(index) as layer:
                for first in range(0, tokens, step):
                    part = slice(first, first + step)
                    self._layer(index, layer, hidden[part], cos[part], sin[part], cache)
            if each_layer is not None:
                each_layer(index)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to float32 logits [tokens, vocab]."""
        return F.linear(
            rms_norm(hidden, self._ends.norm, self.config.norm_eps), self._ends.head
        ).float()

    def _layer(
        self,
        index: int,
        w: LayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: Cache,
    ) -> None:
        """Adds attention and MLP of one layer to `hidden` [tokens, hidden], in place."""
        config, eps = self.config, self.config.norm_eps
        tokens = hidden.shape[0]
        qkv = F.linear(rms_norm(hidden, w["input_norm"], eps), w["qkv"], w.get("qkv_bias"))
        heads = qkv.view(tokens, config.heads + 2 * config.kv_heads, config.head_dim)
        if config.qk_norm:
            for part, weight in zip(
                heads.split((config.heads, config.kv_heads, config.kv_heads), 1),
                (w["q_norm"], w["k_norm"]),
                strict=False,
            ):
                part.copy_(rms_norm(part, weight, eps))
        query = rope_into(heads, cos, sin, *cache.room(index, tokens))
        mixed = cache.attend(index, query).transpose(0, 1).reshape(tokens, -1)
        mixed = F.linear(mixed, w["o"], w.get("o_bias"))
        gate_up = F.linear(rms_norm(hidden, w["post_norm"], eps, mixed), w["gate_up"])
        hidden += F.linear(swiglu(gate_up), w["down"])
