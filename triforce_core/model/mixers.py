"""Computation of the mixers, with one class for each kind of mixer in `layers`."""

from __future__ import annotations

import torch

from triforce_core.model.layers import Attention
from triforce_core.model.norms import Norm
from triforce_kernels.weights.linear import linear
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.ranks import Ranks
from triforce_offload.weights.layouts import Views


class AttentionMixer:
    """Attention through a cache, which rotates, stores and attends."""

    def __init__(self, spec: Attention, norm: Norm, kv_layer: int, ranks: Ranks) -> None:
        """kv_layer: index among the full-attention layers, as KV stores number them, or among the
            layers with a window
        ranks: those that share the heads
        """
        self._spec = spec
        # Caches scale scores by head_dim ** -0.5. Another scale is applied to the queries.
        self._query_factor = None if spec.scale is None else spec.scale * spec.head_dim**0.5
        self._norm = norm
        self._kv_layer = kv_layer
        self._ranks = ranks

    def __call__(
        self, w: Views, hidden: torch.Tensor, cache: Cache, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return the mixer's output [rows, hidden]; if ranks share the model, this rank's summand.

        hidden: hidden states before their norm, if the layer has one, [rows, hidden]
        """
        spec = self._spec
        if "input_norm" in w:
            hidden = self._norm(hidden, w["input_norm"])
        heads = linear(hidden, w["qkv"], w.get("qkv_bias")).view(batch.rows, -1, spec.head_dim)
        if not spec.projects_values:
            heads = torch.cat((heads, heads[:, spec.heads :]), 1)
        queries, keys, values = heads.split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
        if spec.value_norm:
            values.copy_(self._norm(values, values.new_ones(spec.head_dim)))
        if spec.norm_over_heads and self._ranks.count > 1:
            self._norm_over_ranks(queries, w["q_norm"], keys, w["k_norm"])
        elif spec.qk_norm:
            for each, weight in ((queries, w["q_norm"]), (keys, w["k_norm"])):
                rows = each.flatten(1) if spec.norm_over_heads else each
                each.copy_(self._norm(rows, weight).view(each.shape))
        if self._query_factor is not None:
            queries.mul_(self._query_factor)
        if batch.query_scale is not None:
            queries.mul_(batch.query_scale[:, None, None])
        attend = cache.attend if spec.window is None else cache.attend_window
        mixed = attend(self._kv_layer, heads, batch).transpose(0, 1).reshape(batch.rows, -1)
        return linear(mixed, w["o"], w.get("o_bias"))

    def _norm_over_ranks(
        self, queries: torch.Tensor, q_norm: torch.Tensor, keys: torch.Tensor, k_norm: torch.Tensor
    ) -> None:
        """Normalise queries and keys [rows, heads of this rank, head_dim] in place, each by its
        mean of squares over the heads of all ranks.
        """
        parts = [each.flatten(1) for each in (queries, keys)]
        sums = torch.empty(len(queries) + 1, 2, dtype=torch.float32, device=queries.device)
        for index, part in enumerate(parts):
            sums[:-1, index] = part.float().square().sum(-1)
            sums[-1, index] = part.shape[1]
        self._ranks.sum(sums)
        means = sums[:-1] / sums[-1]
        for part, into, weight, mean in zip(
            parts, (queries, keys), (q_norm, k_norm), means.split(1, 1), strict=True
        ):
            into.copy_(self._norm.scaled(part, mean, weight).view(into.shape))
