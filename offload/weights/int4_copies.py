"""Int4Copies: layers in 4 bits on the device, for what drafts while the exact ones stream."""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch

from triforce_kernels import limits
from triforce_kernels.weights.int4 import Int4Weight, quantise
from triforce_kernels.weights.linear import Weight, rows_of
from triforce_offload.checkpoint.layer_cache import LayerCache
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.weights.layouts import FlatLayout, Views

# Changes when other numbers come out of the same weights.
RECIPE = "int4-1"


class Int4Copies:
    """Copies of some layers, each a flat buffer on the device.

    Exact tensors of a layer and their copies have the same names; matrices are Int4Weights here, as
    far as the layout says so, everything else is as it was.

    views: by layer
    """

    def __init__(
        self,
        layout: FlatLayout,
        layers: Collection[int],
        memory: DeviceMemory,
        decoding_bytes: int = 0,
        cache: LayerCache | None = None,
    ) -> None:
        """layout: of each. decoding_bytes: of temporaries that computing with them takes.

        cache: where they are kept from run to run. Raises DoesNotFitError.
        """
        self._memory = memory
        self._cache = cache
        # One at a time: what is quantised takes memory while it is.
        self._quantising = threading.Lock()
        self._allocation = memory.allocate(len(layers) * layout.nbytes, "int4 draft copies")
        try:
            self._decoding = memory.reserve(decoding_bytes, "workspace of int4 draft copies")
        except BaseException:
            memory.free(self._allocation)
            raise
        buffers = self._allocation.bytes.split(layout.nbytes)
        self._buffers = dict(zip(sorted(layers), buffers, strict=True))
        self.views = {layer: layout.views(buffer) for layer, buffer in self._buffers.items()}

    def restore(self, layer: int) -> bool:
        """Fill the copy of a layer from the cache. Return whether it was there."""
        return self._cache is not None and self._cache.read(layer, self._buffers[layer])

    def make(self, layer: int, exact: Views) -> None:
        """Fill the copy of a layer from the exact tensors, wherever these are, and cache it.
        Threads may call it for different layers.
        """
        buffer = self._buffers[layer]
        # What lies between the tensors is kept too.
        buffer.zero_()
        for name, view in self.views[layer].items():
            if isinstance(view, Int4Weight):
                with self._quantising:
                    _quantise_into(exact[name], view)
            else:
                view.copy_(_rows(exact[name], 0, view.shape[0]))
        if self._cache:
            self._cache.write(layer, buffer)

    def close(self) -> None:
        """Gives the memory back; more than once is no harm."""
        self.views, self._buffers = {}, {}
        self._memory.free(self._allocation)
        self._memory.free(self._decoding)


def _rows(exact: Weight, first: int, end: int) -> torch.Tensor:
    part = rows_of(exact, first, end)
    return part if isinstance(part, torch.Tensor) else part.joined()


def _quantise_into(exact: Weight, into: Int4Weight) -> None:
    """Some rows at a time, on the device, so that no matrix is there as a whole."""
    rows, columns = into.shape
    step = max(1, limits.DECODED_AT_ONCE // columns)
    for first in range(0, rows, step):
        part = into.rows(first, min(first + step, rows))
        made = quantise(_rows(exact, first, first + part.shape[0]).to(into.device), into.group)
        part.packed.copy_(made.packed)
        part.scale.copy_(made.scale)
        part.offset.copy_(made.offset)
