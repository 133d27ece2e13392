"""Layers that the processor computes in a forward on a GPU: their weights are in host memory.

Hidden states go to where the weights are. Keys, values and states stay on the device: what a mixer
asks of the cache crosses to the device, and what the cache answers crosses back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax
from triforce_kernels.recurrent.conv import Convolution
from triforce_kernels.recurrent.delta import DeltaRows
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.link.waiting import come
from triforce_offload.weights.layouts import Views


def device_of(weights: Views) -> torch.device:
    """Return the device of a layer's tensors, which computes the layer."""
    return next(iter(weights.values())).device


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, itself if it is there. Raises LinkError."""
    return tensor if tensor.device == device else come(tensor).to(device)


def batch_on(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """Return a forward batch for a layer on a device; what its cache reads stays where it is."""
    if batch.query_scale is None or batch.query_scale.device == device:
        return batch
    return replace(batch, query_scale=moved(batch.query_scale, device))


class CacheElsewhere:
    """Cache: one on the device, for a layer that the processor computes.

    Each call waits for the device once.
    """

    def __init__(self, cache: Cache, device: torch.device) -> None:
        self._cache = cache
        self._device = device

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
        here = convolution._replace(
            weight=self._here(convolution.weight), bias=self._here(convolution.bias)
        )
        return moved(self._cache.convolve(layer, self._here(inputs), here, batch), inputs.device)

    def recur(self, layer: int, rows: DeltaRows, batch: ForwardBatch) -> torch.Tensor:
        """Cache.recur."""
        here = DeltaRows(*map(self._here, rows.tensors), rows.corrects)
        return moved(self._cache.recur(layer, here, batch), rows.values.device)

    def _attended(
        self,
        attend: Callable[..., torch.Tensor],
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax,
    ) -> torch.Tensor:
        here = softmax._replace(sinks=self._here(softmax.sinks))
        mixed = attend(layer, self._here(qkv), batch, here)
        return moved(mixed, qkv.device)

    def _here(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else moved(tensor, self._device)
