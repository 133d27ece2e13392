"""Layers that the processor computes in a forward on a GPU: their weights are in host memory.

Hidden states go to where the weights are, and are float32 there, as a processor's kernels
compute. Keys, values and states stay on the device: what a mixer asks of the cache crosses to the
device, and what the cache answers crosses back, both in the device's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax
from triforce_kernels.attention.selection import Selection
from triforce_kernels.recurrent.conv import Convolution
from triforce_kernels.recurrent.delta import DeltaRows
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.link.waiting import come
from triforce_offload.ranks import Ranks
from triforce_offload.weights.layouts import Views
from triforce_offload.weights.locations import processor_dtype


def device_of(weights: Views) -> torch.device:
    """Return the device of a layer's tensors, which computes the layer."""
    return next(iter(weights.values())).device


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, itself if it is there. Raises LinkError."""
    return tensor if tensor.device == device else come(tensor).to(device)


@dataclass(frozen=True)
class Place:
    """The device that computes a forward, and the dtype of its hidden states there."""

    device: torch.device
    dtype: torch.dtype

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device in its dtype. Raises LinkError."""
        return moved(tensor.to(self.dtype), self.device)


def hidden_for(weights: Views, hidden: torch.Tensor, here: Place) -> torch.Tensor:
    """Return hidden states as a layer with these weights takes them. Raises LinkError."""
    if not weights.by_processor:
        return here.take(hidden)
    return moved(hidden, device_of(weights)).to(processor_dtype(here.dtype))


@dataclass(frozen=True)
class Sums:
    """All-reduces of what layers add to the hidden states, in the dtype of the device: a layer may
    run on one rank's GPU and, in float32, on the processor for another rank.

    dtype: dtype of hidden states on the device, which ranks exchange
    """

    ranks: Ranks
    dtype: torch.dtype

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' parts [..., rows, hidden], in the dtype of `part`, which may
        be overwritten. Raises RankError.
        """
        if self.ranks.count == 1 or part.dtype == self.dtype:
            return self.ranks.sum(part)
        return self.ranks.sum(part.to(self.dtype)).to(part.dtype)


def batch_on(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """Return a forward batch for a layer on a device; what its cache reads stays where it is."""
    if batch.query_scale is None or batch.query_scale.device == device:
        return batch
    return replace(batch, query_scale=moved(batch.query_scale, device))


class CacheElsewhere:
    """Cache: one on the device, for a layer that the processor computes.

    Each call waits for the device once.
    """

    def __init__(self, cache: Cache, here: Place) -> None:
        self._cache = cache
        self._here = here

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend."""
        return self._attended(self._cache.attend, layer, qkv, batch, softmax)

    def attend_window(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend_window."""
        return self._attended(self._cache.attend_window, layer, qkv, batch, softmax)

    def attend_selected(
        self,
        layer: int,
        qkv: torch.Tensor,
        index: torch.Tensor,
        batch: ForwardBatch,
        selection: Selection,
    ) -> torch.Tensor:
        """Cache.attend_selected."""
        take, there = self._here.take, qkv.device

        def grouped(means: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            # The weights that make vectors of means are with the layer.
            means = moved(means, there).to(index.dtype)
            return take(selection.grouped(means, moved(numbers, there)))

        selection = replace(selection, grouped=grouped)
        mixed = self._cache.attend_selected(layer, take(qkv), take(index), batch, selection)
        return moved(mixed, there).to(qkv.dtype)

    def dense(self, layer: int, batch: ForwardBatch, *, has_window: bool = False) -> None:
        """Cache.dense: keys are on the device, and the layer is not."""

    def convolve(
        self,
        layer: int,
        inputs: torch.Tensor,
        convolution: Convolution,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Cache.convolve."""
        take, bias = self._here.take, convolution.bias
        here = convolution._replace(
            weight=take(convolution.weight), bias=None if bias is None else take(bias)
        )
        mixed = self._cache.convolve(layer, take(inputs), here, batch)
        return moved(mixed, inputs.device).to(inputs.dtype)

    def recur(self, layer: int, rows: DeltaRows, batch: ForwardBatch) -> torch.Tensor:
        """Cache.recur."""
        values = rows.values
        if rows.corrects:
            heads = map(self._here.take, (rows.queries, rows.keys, values))
        else:
            # Those of Mamba-2 are float32 on a device too.
            heads = (moved(each, self._here.device) for each in (rows.queries, rows.keys, values))
        gates = (moved(each, self._here.device) for each in (rows.decays, rows.rates))
        here = DeltaRows(*heads, *gates, corrects=rows.corrects)
        return moved(self._cache.recur(layer, here, batch), values.device).to(values.dtype)

    def _attended(
        self,
        attend: Callable[..., torch.Tensor],
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax,
    ) -> torch.Tensor:
        if (sinks := softmax.sinks) is not None:
            softmax = softmax._replace(sinks=moved(sinks, self._here.device))
        mixed = attend(layer, self._here.take(qkv), batch, softmax)
        return moved(mixed, qkv.device).to(qkv.dtype)
