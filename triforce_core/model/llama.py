"""The model: one definition for the Llama family, blind to where weights and KV live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from triforce_kernels.layer import rms_norm, swiglu
from triforce_kernels.linear import Weight, linear, lookup

from offload.feed import Cache, Feed
from offload.layouts import Views
from offload.link.waiting import come
from offload.ranks import Alone, Ranks
from offload.weights import Weights
from triforce_core.model.config import ModelConfig
from triforce_core.model.rope import Rope


@dataclass(frozen=True)
class Ends:
    """What comes before the first layer and after the last.

    embedding: [rows, hidden], on the device or in host memory
    norm: [hidden]; head: [rows, hidden], on the device
    first: token of the first of these rows; widths: rows of each rank, of which this is one
    """

    embedding: Weight
    norm: torch.Tensor
    head: Weight
    first: int = 0
    widths: Sequence[int] = ()


class Model:
    """Forwards. Holds what is not a layer: embedding, norm, head and rope.

    Where ranks share the model, each has some heads, some columns of the MLP and some rows of the
    vocabulary (Megatron-LM, Shoeybi et al., 2019): two sums a layer, one of what is looked up, and
    one gathering of logits.

    config: of this rank's share; device: where it computes
    """

    def __init__(
        self,
        config: ModelConfig,
        ends: Ends,
        rope: Rope,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.rope = rope
        self.device = device
        self._ends = ends
        self._ranks = ranks or Alone()

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
        hidden = self._embed(feed.tokens)
        feed = replace(feed, rotation=self.rope.rotation(feed.positions, hidden))
        parts = [(hidden[part.first : part.end], part) for part in feed.parts(chunk)]
        for index in range(self.config.layers):
            with weights.layer(index) as layer:
                for rows, part in parts:
                    self._layer(index, layer, rows, cache, part)
            if each_layer is not None:
                each_layer(index)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to float32 logits [tokens, vocab]; to none of them, [tokens, 0], on a
        rank that does not lead.
        """
        ends = self._ends
        part = linear(rms_norm(hidden, ends.norm, self.config.norm_eps), ends.head).float()
        return self._ranks.gather(part, ends.widths)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]"""
        ends = self._ends
        rows, dtype = tokens, ends.norm.dtype
        if tokens.device != ends.embedding.device:
            rows = come(tokens).to(ends.embedding.device)
        if self._ranks.count == 1:
            return lookup(ends.embedding, rows, dtype).to(self.device)
        rows = rows - ends.first
        last = ends.embedding.shape[0] - 1
        elsewhere = (rows < 0) | (rows > last)
        hidden = lookup(ends.embedding, rows.clamp(0, last), dtype)
        hidden = hidden.masked_fill_(elsewhere.unsqueeze(1), 0)
        return self._ranks.sum(hidden.to(self.device))

    def _layer(self, index: int, w: Views, hidden: torch.Tensor, cache: Cache, feed: Feed) -> None:
        """Adds attention and MLP of one layer to `hidden` [rows, hidden], in place."""
        hidden += self._mlp(w, hidden, self._attention(index, w, hidden, cache, feed))

    def _attention(
        self, index: int, w: Views, hidden: torch.Tensor, cache: Cache, feed: Feed
    ) -> torch.Tensor:
        """[rows, hidden]. What it makes on the way is gone before the MLP makes its own."""
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
        return self._ranks.sum(linear(mixed, w["o"], w.get("o_bias")))

    def _mlp(self, w: Views, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """[rows, hidden]. Adds `mixed` to `hidden` before, in place."""
        gate_up = linear(
            rms_norm(hidden, w["post_norm"], self.config.norm_eps, mixed), w["gate_up"]
        )
        return self._ranks.sum(linear(swiglu(gate_up), w["down"]))
