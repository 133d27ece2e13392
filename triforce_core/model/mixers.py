"""Computation of the mixers, with one class for each kind of mixer in `layers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from triforce_core.model.elsewhere import moved
from triforce_core.model.layers import Attention, HeadGate, LatentAttention, LayerSpec
from triforce_core.model.norms import Norm
from triforce_core.model.parts.recurrent import DeltaNet, LinearAttention, Mamba2, ShortConv
from triforce_kernels.attention.attention import Softmax
from triforce_kernels.attention.selection import Selection
from triforce_kernels.elementwise import sigmoid, softplus
from triforce_kernels.experts.heads import HeadTiles, by_heads
from triforce_kernels.layer import rms_norm, rotate
from triforce_kernels.limits import FEW_ROWS
from triforce_kernels.recurrent.conv import Convolution
from triforce_kernels.recurrent.delta import DeltaRows
from triforce_kernels.recurrent.gates import (
    Skip,
    delta_gates,
    gated,
    gated_norm,
    norm_of_gated,
    step_gates,
)
from triforce_kernels.weights.linear import linear
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.ranks import Ranks
from triforce_offload.weights.layouts import Views

_HEAD_GATES = {HeadGate.SOFTPLUS: softplus, HeadGate.SIGMOID: sigmoid}


class MixerLayer(Protocol):
    """The computation of a layer's mixer.

    No sum may depend on the number of rows, nor a function of numbers on their place: a row has the
    same bits in every forward (`triforce_kernels.same_bits`).
    """

    def __call__(
        self, w: Views, projected: torch.Tensor, cache: Cache, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return what the output's projection takes, [rows, columns of "o"].

        projected: products of the layer's normed hidden states with "qkv", [rows, its rows]
        """


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
        self, w: Views, projected: torch.Tensor, cache: Cache, batch: ForwardBatch
    ) -> torch.Tensor:
        """MixerLayer.__call__."""
        spec = self._spec
        index = None
        if spec.index:
            index, projected = projected[:, -spec.index.rows :], projected[:, : -spec.index.rows]
            projected = projected.contiguous()
        if spec.head_gate:
            head_gate = _HEAD_GATES[spec.head_gate](projected[:, -spec.heads :].float())
            projected = projected[:, : -spec.heads].contiguous()
        heads = projected.view(batch.rows, -1, spec.head_dim)
        if spec.output_gate:
            gated = heads[:, : 2 * spec.heads]
            gate = gated[:, 1::2].flatten(1)
            heads = torch.cat((gated[:, ::2], heads[:, 2 * spec.heads :]), 1)
        if spec.projects_keys and not spec.projects_values:
            heads = torch.cat((heads, heads[:, spec.heads :]), 1)
        self._prepare(w, heads, batch)
        if spec.shares_kv or spec.reuses_kv:
            heads = self._shared(heads, batch)
        mixed = self._attended(w, heads, index, cache, batch)
        mixed = mixed.transpose(0, 1).reshape(batch.rows, -1)
        if spec.output_gate:
            mixed *= sigmoid(gate)
        if spec.head_gate:
            mixed.unflatten(1, (-1, spec.head_dim)).mul_(head_gate.to(mixed.dtype)[..., None])
        return mixed

    def _shared(self, heads: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return queries, keys and values, of which the latter are shared or those of an earlier
        layer.
        """
        shared, key = batch.carried.shared_kv, (self._spec.window is not None, batch.first)
        if self._spec.shares_kv:
            # Caches rotate keys in place.
            shared[key] = heads[:, self._spec.heads :].clone()
            return heads
        # The processor may compute one of the layers.
        return torch.cat((heads, moved(shared[key], heads.device).to(heads.dtype)), 1)

    def _attended(
        self,
        w: Views,
        heads: torch.Tensor,
        index: torch.Tensor | None,
        cache: Cache,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Return what a cache attends, [heads, rows, head_dim].

        index: products with the rows of an index in "qkv", if there is one
        """
        spec = self._spec
        if index is None:
            attend = cache.attend if spec.window is None else cache.attend_window
            softmax = Softmax(w.get("sinks"), spec.score_cap)
            return attend(self._kv_layer, heads, batch, softmax)
        parts = index.unflatten(1, (-1, spec.index.dim)).contiguous()
        queries = self._norm(parts[:, :-1].contiguous(), w["index_q_norm"])

        def rotated(vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            # The processor may compute the layer; angles are the device's.
            turning = batch.index_rotation(positions)
            cos, sin = (moved(each, vectors.device).to(vectors.dtype) for each in turning)
            return _rotated(vectors, (cos, sin))

        parts[:, :-1] = rotated(queries, batch.positions)

        def grouped(means: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            normed = self._norm(means, w["index_k_norm"]).unsqueeze(1)
            return rotated(normed, numbers * spec.index.block).squeeze(1)

        selection = Selection(spec.index.budget, spec.index.block, grouped)
        return cache.attend_selected(self._kv_layer, heads, parts, batch, selection)

    def _prepare(self, w: Views, heads: torch.Tensor, batch: ForwardBatch) -> None:
        """Norm queries, keys and values and scale queries, in place, as far as the layer does.

        heads: [rows, heads, head_dim], queries first, then keys
        """
        spec = self._spec
        scales = self._query_factor is not None or batch.query_scale is not None
        if not (spec.value_norm or spec.qk_norm or scales):
            return
        queries, keys, values = heads.tensor_split((spec.heads, spec.heads + spec.kv_heads), 1)
        if spec.value_norm:
            values.copy_(self._norm(values, values.new_ones(spec.head_dim)))
        if spec.norm_over_heads and self._ranks.count > 1:
            self._norm_over_ranks(queries, w["q_norm"], keys, w["k_norm"])
        elif spec.qk_norm:
            normed = [(queries, "q_norm"), (keys, "k_norm")][: 1 + spec.projects_keys]
            for each, weight in ((each, w[name]) for each, name in normed):
                rows = each.flatten(1) if spec.norm_over_heads else each
                each.copy_(self._norm(rows, weight).view(each.shape))
        if self._query_factor is not None:
            queries.mul_(self._query_factor)
        if batch.query_scale is not None:
            queries.mul_(batch.query_scale[:, None, None])

    def _norm_over_ranks(
        self, queries: torch.Tensor, q_norm: torch.Tensor, keys: torch.Tensor, k_norm: torch.Tensor
    ) -> None:
        """Normalise queries and keys [rows, heads of this rank, head_dim] in place, each by its
        mean of squares over the heads of all ranks.
        """
        parts = [each.flatten(1) for each in (queries, keys)]
        means = _mean_over_ranks(self._ranks, parts)
        for part, into, weight, mean in zip(
            parts, (queries, keys), (q_norm, k_norm), means.split(1, 1), strict=True
        ):
            into.copy_(self._norm.scaled(part, mean, weight).view(into.shape))


def _mean_over_ranks(ranks: Ranks, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of squares of each part's rows over the columns of all ranks, [rows, parts]
    float32.

    parts: this rank's, [rows, columns] each
    """
    rows, device = len(parts[0]), parts[0].device
    sums = torch.empty(rows + 1, len(parts), dtype=torch.float32, device=device)
    for index, part in enumerate(parts):
        squares = part.float().square()
        sums[:-1, index : index + 1] = linear(squares, squares.new_ones(1, part.shape[1]))
        sums[-1, index] = part.shape[1]
    ranks.sum(sums)
    return sums[:-1] / sums[-1]


def _rotated(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return heads [rows, heads, dim] rotated. rotation: cosines and sines, [rows, dim] each"""
    return rotate(heads, *(each.unsqueeze(1) for each in rotation))


class LatentMixer:
    """Latent attention. Queries are projected into the space of what tokens keep, and no keys or
    values of heads are computed.

    Of a query and of what a token keeps, the numbers that are rotated are the first ones of each
    half, as `Rope` turns heads in part.
    """

    def __init__(self, spec: LatentAttention, norm: Norm, kv_layer: int) -> None:
        """kv_layer: index among the full-attention layers"""
        self._spec = spec
        # As of AttentionMixer.
        self._query_factor = spec.scale * spec.head_dim**0.5
        self._norm = norm
        self._kv_layer = kv_layer

    def __call__(
        self, w: Views, projected: torch.Tensor, cache: Cache, batch: ForwardBatch
    ) -> torch.Tensor:
        """MixerLayer.__call__."""
        # No temporary has a name here, which would keep it longer than it is needed.
        spec, device, tiles = self._spec, projected.device, None
        if batch.rows <= FEW_ROWS:
            made = partial(HeadTiles.of, batch.rows, spec.heads, device)
            tiles = batch.once((spec.heads, device), made)
        mixed = cache.attend(self._kv_layer, self._heads(w, projected, tiles, batch), batch)
        halves = mixed.transpose(0, 1).unflatten(2, (2, -1))[..., spec.rope_dim // 2 :]
        return by_heads(halves.flatten(2), w["v_up"], tiles).flatten(1)

    def _heads(
        self, w: Views, projected: torch.Tensor, tiles: HeadTiles | None, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return queries, and last the vector that a token keeps, [rows, heads + 1, head_dim]."""
        spec = self._spec
        queries, kept = projected.tensor_split((-spec.head_dim,), 1)
        if spec.query_rank:
            queries = linear(self._norm(queries.contiguous(), w["q_norm"]), w["q_up"])
        queries = queries.reshape(len(projected), spec.heads, -1)
        plain, turning = queries.split((spec.key_dim, spec.rope_dim), 2)
        query = _whole(by_heads(plain, w["k_up"], tiles), turning).mul_(self._query_factor)
        if batch.query_scale is not None:
            query.mul_(batch.query_scale[:, None, None])
        latent, turning = kept.split((spec.latent, spec.rope_dim), 1)
        key = _whole(self._norm(latent.contiguous(), w["k_norm"]), turning)
        return torch.cat((query, key.unsqueeze(1)), 1)


def _whole(latent: torch.Tensor, turning: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., size] of their parts: in each half, what is rotated comes first."""
    halves = (each.unflatten(-1, (2, -1)) for each in (turning, latent))
    return torch.cat(tuple(halves), -1).flatten(-2)


class _LinearMixer:
    """A mixer with linear attention, through a cache that keeps the inputs of the convolution and
    the state.
    """

    def __init__(self, spec: LinearAttention, norm: Norm, place: int) -> None:
        """place: index among the recurrent layers"""
        self._spec = spec
        self._norm = norm
        self._place = place

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, [rows, heads, size], of what the convolution gives."""
        spec = self._spec
        queries, keys, values = mixed.split((spec.keys, spec.keys, spec.values), 1)
        return (
            queries.unflatten(1, (-1, spec.key_dim)),
            keys.unflatten(1, (-1, spec.key_dim)),
            values.unflatten(1, (-1, spec.value_dim)),
        )


class DeltaNetMixer(_LinearMixer):
    """Gated DeltaNet."""

    _spec: DeltaNet

    def __call__(
        self, w: Views, projected: torch.Tensor, cache: Cache, batch: ForwardBatch
    ) -> torch.Tensor:
        """MixerLayer.__call__."""
        spec = self._spec
        sizes = spec.channels, spec.values, spec.value_heads, spec.value_heads
        inputs, gate, rates, decays = projected.split(sizes, 1)
        convolution = Convolution(w["conv"], activates=True)
        mixed = cache.convolve(self._place, inputs, convolution, batch)
        gates = delta_gates(decays, rates, w["decay"], w["decay_bias"])
        rows = DeltaRows(*self._heads(mixed), *gates)
        out = cache.recur(self._place, rows, batch)
        if spec.sigmoid_gate:
            normed = rms_norm(out, w["head_norm"], self._norm.eps).flatten(1)
            gated = (normed.float() * sigmoid(gate.float())).to(out.dtype)
        else:
            gated = gated_norm(out, w["head_norm"], gate, self._norm.eps)
        if spec.tiled_output:
            heads = gated.view(batch.rows, spec.key_heads, -1, spec.value_dim)
            gated = heads.transpose(1, 2).reshape(gated.shape)
        return gated


class Mamba2Mixer(_LinearMixer):
    """Mamba-2. Steps are not clamped, as in mamba_ssm, vLLM and llama.cpp."""

    _spec: Mamba2

    def __init__(self, spec: Mamba2, norm: Norm, place: int, ranks: Ranks) -> None:
        """ranks: those that share the heads"""
        super().__init__(spec, norm, place)
        self._ranks = ranks

    def __call__(
        self, w: Views, projected: torch.Tensor, cache: Cache, batch: ForwardBatch
    ) -> torch.Tensor:
        """MixerLayer.__call__."""
        spec = self._spec
        inputs, gate, steps = projected.split((spec.channels, spec.values, spec.value_heads), 1)
        convolution = Convolution(w["conv"], w.get("conv_bias"), activates=True)
        mixed = cache.convolve(self._place, inputs, convolution, batch).float()
        gates = step_gates(steps, w["decay"], w["decay_bias"])
        rows = DeltaRows(*self._heads(mixed), *gates, corrects=False)
        out = cache.recur(self._place, rows, batch).flatten(1)
        skip = Skip(mixed[:, -spec.values :], w["skip"])
        if spec.divided_group:
            return self._norm_over_ranks(gated(out, skip, gate), w["head_norm"])
        return norm_of_gated(out, skip, w["head_norm"], gate, self._norm.eps, spec.key_heads)

    def _norm_over_ranks(self, gated: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the norm of a group, [rows, columns of this rank] in the dtype of the weights, by
        its mean of squares over the columns of all ranks.

        gated: [rows, columns of this rank] float32
        """
        mean = _mean_over_ranks(self._ranks, (gated,))
        return (gated * torch.rsqrt(mean + self._norm.eps)).to(weight.dtype) * weight


class ShortConvMixer:
    """A gated short convolution, through a cache that keeps its inputs."""

    def __init__(self, spec: ShortConv, norm: Norm, place: int) -> None:
        """place: index among the recurrent layers"""
        self._spec = spec
        self._place = place

    def __call__(
        self, w: Views, projected: torch.Tensor, cache: Cache, batch: ForwardBatch
    ) -> torch.Tensor:
        """MixerLayer.__call__."""
        before, after, inputs = projected.split(self._spec.channels, 1)
        convolution = Convolution(w["conv"], w.get("conv_bias"))
        mixed = cache.convolve(self._place, before * inputs, convolution, batch)
        return mixed.mul_(after)


def mixer_layer(spec: LayerSpec, norm: Norm, place: int, ranks: Ranks) -> MixerLayer:
    """Return the computation of a layer's mixer.

    place: index of the layer among those that keep the same, see `ModelConfig.kv_places`
    """
    if isinstance(spec.mixer, LatentAttention):
        return LatentMixer(spec.mixer, norm, place)
    if isinstance(spec.mixer, Attention):
        return AttentionMixer(spec.mixer, norm, place, ranks)
    if isinstance(spec.mixer, Mamba2):
        return Mamba2Mixer(spec.mixer, norm, place, ranks)
    return _RECURRENT[type(spec.mixer)](spec.mixer, norm, place)


_RECURRENT: dict[type, Callable[..., MixerLayer]] = {
    DeltaNet: DeltaNetMixer,
    ShortConv: ShortConvMixer,
}
