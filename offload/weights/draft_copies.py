"""Draft copies: layers in 3 or 4 bits on the device for drafting, while exact layers stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from triforce_kernels import limits
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.integers import IntegerWeight, quantise
from triforce_kernels.weights.linear import Weight, dense_rows, matrices
from triforce_offload.checkpoint.layer_cache import LayerCache
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.weights.layouts import FlatLayout, Views

Inputs = Callable[[str], torch.Tensor | None]
# Change this when the same weights give other numbers.
RECIPE = "integers-2"


class DraftCopies:
    """Draft copies of some layers, each a flat buffer on the device.

    The exact tensors of a layer and their copies have the same names. Matrices are IntegerWeights
    here where the layout says so; all other tensors are unchanged.

    views: tensors of the copies, by layer
    missing: layers whose copies are still to be made
    """

    def __init__(
        self,
        layouts: Mapping[int, FlatLayout],
        memory: DeviceMemory,
        decoding_bytes: int = 0,
        cache: LayerCache | None = None,
        spare_bytes: int = 0,
    ) -> None:
        """layouts: layout of each copy, by layer
        decoding_bytes: bytes of temporaries that products with the copies need
        cache: disk cache that keeps the copies from run to run
        spare_bytes: device bytes that making copies may take for a moment

        Raises DoesNotFitError.
        """
        self._memory = memory
        self._cache = cache
        self._at_once = limits.DECODED_AT_ONCE
        if memory.device.type != "cpu":
            room = min(spare_bytes // limits.QUANTISE_BYTES, limits.QUANTISED_AT_ONCE_ON_GPU)
            self._at_once = max(self._at_once, room)
        self._allocation = memory.allocate(
            sum(layout.nbytes for layout in layouts.values()), "draft copies"
        )
        try:
            self._decoding = memory.reserve(decoding_bytes, "workspace of draft copies")
        except BaseException:
            memory.free(self._allocation)
            raise
        layers = sorted(layouts)
        buffers = self._allocation.bytes.split([layouts[layer].nbytes for layer in layers])
        self._buffers = dict(zip(layers, buffers, strict=True))
        self.views = {layer: layouts[layer].views(self._buffers[layer]) for layer in layers}
        self.missing = set(layers)

    def restore(self, layer: int) -> None:
        """Fill the copy of a layer from the cache, if there is a copy and the cache has it. Threads
        may call this for different layers.
        """
        if self._cache and layer in self.missing and self._cache.read(layer, self._buffers[layer]):
            self.missing.discard(layer)

    def make(self, layer: int, exact: Views, inputs: Inputs = lambda name: None) -> None:
        """Fill the copy of a layer from the exact tensors, on any device, and write it to the
        cache.

        inputs: returns the sizes of what each column of a named matrix multiplies, [in], None if
            they are not known (`triforce_kernels.weights.inputs`)
        """
        buffer = self._buffers[layer]
        # The cache keeps the padding between tensors too, so it must be defined.
        buffer.zero_()
        for name, view in self.views[layer].items():
            if isinstance(view, IntegerWeight):
                _quantise_into(exact[name], view, inputs(name), self._at_once)
            else:
                _copy_into(exact[name], view)
        if self._cache:
            self._cache.write(layer, buffer)
        self.missing.discard(layer)

    def close(self) -> None:
        """Free the memory. Further calls do nothing."""
        self.views, self._buffers, self.missing = {}, {}, set()
        self._memory.free(self._allocation)
        self._memory.free(self._decoding)


def _quantise_into(
    exact: Weight, into: IntegerWeight, inputs: torch.Tensor | None, at_once: int
) -> None:
    """Quantise some rows at a time on the device, so that no dense matrix exists as a whole.

    at_once: numbers of these rows
    """
    step = max(1, at_once // into.shape[1])
    dtype, start = into.scale.dtype, 0
    for piece in _pieces(exact, step):
        dense = isinstance(piece, torch.Tensor)
        for _, decoded in enumerate((piece,)) if dense else dense_rows(piece, dtype):
            for rows in decoded.split(step):
                part = into.rows(start, start + rows.shape[0])
                made = quantise(rows.to(into.device, dtype), into.group, inputs, into.bits)
                part.packed.copy_(made.packed)
                part.scale.copy_(made.scale)
                part.offset.copy_(made.offset)
                start += rows.shape[0]


def _pieces(exact: Weight, step: int) -> Iterator[Weight]:
    """Yield the rows of a matrix one after the other; of blocks `step` rows at a time, so that no
    more are decoded at a time.
    """
    for matrix in matrices(exact):
        if not isinstance(matrix, BlockWeight):
            yield matrix
            continue
        for first in range(0, matrix.shape[0], step):
            yield matrix.rows(first, min(first + step, matrix.shape[0]))


def _copy_into(exact: Weight, into: torch.Tensor) -> None:
    if isinstance(exact, torch.Tensor):
        into.copy_(exact)
        return
    for first, rows in dense_rows(exact, into.dtype):
        into[first : first + rows.shape[0]] = rows
