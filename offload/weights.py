"""The weights of a model's layers: on the device, or streamed through slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from triforce_offload.conveyor import Conveyor
from triforce_offload.homes import DeviceHome, FileHome, HostHome, LayerHome, SplitHome
from triforce_offload.int4_copies import Int4Copies
from triforce_offload.layouts import FlatLayout, Views
from triforce_offload.link.trace import Tracer
from triforce_offload.memory.device import Allocation, DeviceMemory
from triforce_offload.memory.host import HostBuffers, HostMemory
from triforce_offload.schedule import WEIGHTS

# Layers that are read and dequantised at a time.
_READERS = 4
Fill = Callable[[int, Views], None]
Loaded = Callable[[int, Views | None], None]


class Weights(Protocol):
    """Where a forward gets its layers from: resident, or streamed just in time."""

    def layer(self, index: int) -> AbstractContextManager[Views]:
        """The tensors of a layer, valid inside the block. Asked for in order."""


class WeightStore:
    """Every layer as one flat buffer with a home.

    homes, layouts: of each layer
    """

    def __init__(
        self,
        layouts: Sequence[FlatLayout],
        streamed: Collection[int],
        memory: DeviceMemory,
        host: HostMemory,
        fill: Fill,
        in_files: Collection[int] = (),
        loaded: Loaded = lambda layer, views: None,
        halved: Collection[int] = (),
    ) -> None:
        """fill(layer, views) writes a layer's tensors where they will live; threads call it.

        in_files: streamed layers that are filled anew, into what they cross the link from, each
            time they do. loaded(layer, views) is called after each, in threads; it has no views of
            those. halved: streamed layers of which the low bits alone do
        Raises DoesNotFitError before anything is read.
        """
        self.layouts = layouts
        self._memory = memory
        on_device, on_host = [], []
        for layer, layout in enumerate(layouts):
            if layer in halved:
                on_device.append(layout.high_bytes)
                on_host.append(layout.low_bytes)
            elif layer not in in_files:
                (on_host if layer in streamed else on_device).append(layout.nbytes)
        self._host = HostBuffers(on_host, host)
        try:
            self._device: Allocation = memory.allocate(sum(on_device), "resident weights")
        except BaseException:
            self._host.close()
            raise
        device_buffers = iter(self._device.bytes.split(on_device))
        host_buffers = iter(self._host.buffers)
        self.homes: list[LayerHome] = []
        views: list[Views | None] = []
        for layer, layout in enumerate(layouts):
            if layer in in_files:
                self.homes.append(FileHome(_FilledLayer(layer, layout, fill)))
                views.append(None)
                continue
            if layer in halved:
                halves = next(device_buffers), next(host_buffers)
                self.homes.append(SplitHome(*halves))
                views.append(layout.joined(*halves))
                continue
            streams = layer in streamed
            buffer = next(host_buffers if streams else device_buffers)
            self.homes.append((HostHome if streams else DeviceHome)(buffer))
            views.append(layout.views(buffer))

        def load(layer: int, into: Views | None) -> None:
            if into is not None:
                fill(layer, into)
            loaded(layer, into)

        try:
            with ThreadPoolExecutor(_READERS, "weights") as readers:
                # What fails first ends it; layers that are not begun are left.
                for _ in readers.map(load, range(len(views)), views):
                    pass
        except BaseException:
            self.close()
            raise

    @property
    def resident_layers(self) -> int:
        return sum(home.source is None for home in self.homes)

    @property
    def crossing_bytes(self) -> list[int]:
        """Of each layer, what crosses the link in a pass."""
        return [home.source.bytes.numel() if home.source else 0 for home in self.homes]

    def close(self) -> None:
        self.homes.clear()
        self._memory.free(self._device)
        self._host.close()


class _FilledLayer:
    """OnDemand: a layer as `fill` writes it."""

    def __init__(self, layer: int, layout: FlatLayout, fill: Fill) -> None:
        self._layer = layer
        self._layout = layout
        self._fill = fill

    def numel(self) -> int:
        return self._layout.nbytes

    def read(self, into: torch.Tensor) -> None:
        self._fill(self._layer, self._layout.views(into))


class StreamedWeights:
    """The weights as a pass gets them: the model asks for a layer and cannot tell where it was."""

    def __init__(self, store: WeightStore, conveyor: Conveyor, trace: Tracer) -> None:
        self._store = store
        self._conveyor = conveyor
        self._trace = trace
        self._views: dict[tuple[int, int], Views] = {}

    def forget(self) -> None:
        """Lets go of the slots that layers came through."""
        self._views.clear()

    @contextmanager
    def layer(self, index: int) -> Iterator[Views]:
        """Weights.layer. Raises LinkError."""
        home = self._store.homes[index]
        with self._conveyor.bring((WEIGHTS, index), home) as buffer:
            key = (index, buffer.data_ptr())
            if key not in self._views:
                self._views[key] = home.views(self._store.layouts[index], buffer)
            with self._trace.compute("layer", layer=index):
                yield self._views[key]


class ResidentWeights:
    """Layers that are all on the device, exact or not: what a level that drafts computes with."""

    def __init__(
        self, store: WeightStore, int4_copies: Int4Copies | None = None, *, high: bool = False
    ) -> None:
        """int4_copies: of layers that are taken from there, streamed ones or more. high: whether
        only the high bits are read of those that are split, as it must be where the low
        ones stream.
        """
        instead = int4_copies.views if int4_copies else {}
        self._views: list[Views] = []
        for layer, (layout, home) in enumerate(zip(store.layouts, store.homes, strict=True)):
            if layer in instead:
                self._views.append(instead[layer])
            else:
                self._views.append(home.draft_views(layout, high=high))

    def layer(self, index: int) -> AbstractContextManager[Views]:
        """Weights.layer."""
        return nullcontext(self._views[index])
