"""The model: one definition for the Llama family, blind to where weights and KV live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from triforce_kernels.layer import rms_norm, swiglu
from triforce_kernels.linear import Weight, linear, lookup

from offload.feed import Cache, Feed
from offload.layouts import Views
from offload.weights import Weights
from triforce_core.model.config import ModelConfig
from triforce_core.model.rope import Rope


@dataclass(frozen=True)
class Ends:
    """What comes before the first layer and after the last.

    embedding: [vocab, hidden], on the device or in host memory
    norm: [hidden]; head: [vocab, hidden], on the device
    """

    embedding: Weight
    norm: torch.Tensor
    head: Weight


class Model:
    """Forwards. Holds what is not a layer: embedding, norm, head and rope.

    device: where it computes
    """

    def __init__(self, config: ModelConfig, ends: Ends, rope: Rope, device: torch.device) -> None:
        self.config = config
        self.rope = rope
        self.device = device
        self._ends = ends

    @property
    def recordable(self) -> bool:
        """Whether a forward can be recorded as a graph: nothing in it is computed by the host."""
        return not self.rope.depends_on_length and self._ends.embedding.device == self.device

    def forward(
        self,
        feed: Feed,
        weights: Weights,
        cache: Cache,
        *,
        chunk: int | None = None,
        each_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """One forward over a feed.

        chunk: rows of a layer computed at a time, None for all; each layer is asked for once either
        way. each_layer is called after each layer with its index.
        Returns hidden states before the final norm, [rows, hidden].
        """
        embedding, dtype = self._ends.embedding, self._ends.norm.dtype
        hidden = lookup(embedding, feed.tokens.to(embedding.device), dtype).to(self.device)
        feed = replace(feed, rotation=self.rope.rotation(feed.positions, hidden))
        parts = list(feed.parts(chunk))
        for index in range(self.config.layers):
            with weights.layer(index) as layer:
                for part in parts:
                    self._layer(index, layer, hidden[part.first : part.end], cache, part)
            if each_layer is not None:
                each_layer(index)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to float32 logits [tokens, vocab]."""
        return linear(
            rms_norm(hidden, self._ends.norm, self.config.norm_eps), self._ends.head
        ).float()

    def _layer(self, index: int, w: Views, hidden: torch.Tensor, cache: Cache, feed: Feed) -> None:
        """Adds attention and MLP of one layer to `hidden` [rows, hidden], in place."""
        config, eps = self.config, self.config.norm_eps
        qkv = linear(rms_norm(hidden, w["input_norm"], eps), w["qkv"], w.get("qkv_bias"))
        heads = qkv.view(feed.rows, config.heads + 2 * config.kv_heads, config.head_dim)
        if config.qk_norm:
            for part, weight in zip(
                heads.split((config.heads, config.kv_heads, config.kv_heads), 1),
                (w["q_norm"], w["k_norm"]),
                strict=False,
            ):
                part.copy_(rms_norm(part, weight, eps))
        mixed = cache.attend(index, heads, feed).transpose(0, 1).reshape(feed.rows, -1)
        mixed = linear(mixed, w["o"], w.get("o_bias"))
        gate_up = linear(rms_norm(hidden, w["post_norm"], eps, mixed), w["gate_up"])
        hidden += linear(swiglu(gate_up), w["down"])
