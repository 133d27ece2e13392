"""The model: a loop over layers, blind to where weights and KV live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from triforce_core.model.config import ModelConfig
from triforce_core.model.mixers import AttentionMixer
from triforce_core.model.mlps import dense_mlp
from triforce_core.model.rope import Rope
from triforce_kernels.layer import rms_norm
from triforce_kernels.weights.linear import Weight, linear, lookup
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.link.waiting import come
from triforce_offload.ranks import Alone, Ranks
from triforce_offload.weights.layouts import Views
from triforce_offload.weights.store import Weights


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
        self._mixers = [
            AttentionMixer(config.layers[layer].mixer, config.norm_eps, kv_layer)
            for kv_layer, layer in enumerate(config.kv_layers)
        ]

    @property
    def recordable(self) -> bool:
        """Whether a forward can be recorded as a graph: nothing in it is computed by the host."""
        return not self.rope.depends_on_length and self._ends.embedding.device == self.device

    def forward(
        self,
        batch: ForwardBatch,
        weights: Weights,
        cache: Cache,
        *,
        chunk: int | None = None,
        each_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """One forward over a forward batch.

        chunk: rows of a layer computed at a time, None for all; each layer is asked for once either
        way. each_layer is called after each layer with its index.
        Returns hidden states before the final norm, [rows, hidden].
        """
        hidden = self._embed(batch.tokens)
        batch = replace(batch, rotation=self.rope.rotation(batch.positions, hidden))
        parts = [(hidden[part.first : part.end], part) for part in batch.parts(chunk)]
        for index in range(len(self.config.layers)):
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

    def _layer(
        self, index: int, w: Views, hidden: torch.Tensor, cache: Cache, batch: ForwardBatch
    ) -> None:
        """Adds mixer and MLP of one layer to `hidden` [rows, hidden], in place.

        Each makes its own norm: what it makes on the way is gone before the next one begins.
        """
        mixed = self._ranks.sum(self._mixers[index](w, hidden, cache, batch))
        hidden += self._ranks.sum(dense_mlp(w, hidden, self.config.norm_eps, mixed))
