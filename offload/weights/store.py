"""The weights of a model's layers: on the device, or streamed through slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from triforce_offload.conveyor import Conveyor
from triforce_offload.link.trace import Tracer
from triforce_offload.memory.device import Allocation, DeviceMemory
from triforce_offload.memory.host import HostBuffers, HostMemory
from triforce_offload.plan.memory_plan import LayerPlan, Where
from triforce_offload.schedule import WEIGHTS
from triforce_offload.weights.draft_copies import DraftCopies
from triforce_offload.weights.expert_pool import ExpertPool
from triforce_offload.weights.layouts import FlatLayout, Views
from triforce_offload.weights.locations import (
    DeviceLocation,
    FileLocation,
    HostLocation,
    LayerLocation,
    PartlyResidentLocation,
    ProcessorLocation,
)

# Number of layers that are read and dequantised at the same time.
_READERS = 4
Fill = Callable[[int, Views], None]
Loaded = Callable[[int], None]


class Weights(Protocol):
    """Gives a forward its layers: resident, or streamed just in time."""

    def layer(self, index: int) -> AbstractContextManager[Views]:
        """Give the tensors of a layer, valid inside the block. Layers are requested in order."""


class WeightStore:
    """Every layer as one flat buffer with a location.

    locations, layouts: location and layout of each layer
    in_passes: locations that passes use, where these differ: of layers that the processor computes
    """

    def __init__(
        self,
        layouts: Sequence[FlatLayout],
        plans: Sequence[LayerPlan],
        memory: DeviceMemory,
        host: HostMemory,
        fill: Fill,
        loaded: Loaded = lambda layer: None,
    ) -> None:
        """layouts, plans: layout and plan of each layer
        fill: `fill(layer, views)` writes a layer's tensors to their final memory. Threads call it,
            once for each layer; for a layer in files they call it each time it crosses the link
        loaded: `loaded(layer)` is called in a thread after each layer is filled; at once for a
            layer in files

        Raises DoesNotFitError before anything is read.
        """
        self.layouts = layouts
        self._memory = memory
        on_device = [plan.device_bytes for plan in plans]
        self._host = HostBuffers([plan.host_bytes for plan in plans], host)
        try:
            self._device: Allocation = memory.allocate(sum(on_device), "resident weights")
        except BaseException:
            self._host.close()
            raise
        self.locations: list[LayerLocation] = []
        views = self._locate(layouts, plans, self._device.bytes.split(on_device), fill)
        self.in_passes: list[LayerLocation] = [
            ProcessorLocation(location) if plan.where is Where.PROCESSOR else location
            for plan, location in zip(plans, self.locations, strict=True)
        ]

        def load(layer: int, into: Views | None) -> None:
            if into is not None:
                fill(layer, into)
            loaded(layer)

        try:
            with ThreadPoolExecutor(_READERS, "weights") as readers:
                # The first failure ends the loop; layers that were not started are not loaded.
                for _ in readers.map(load, range(len(views)), views):
                    pass
        except BaseException:
            self.close()
            raise

    def _locate(
        self,
        layouts: Sequence[FlatLayout],
        plans: Sequence[LayerPlan],
        on_device: Sequence[torch.Tensor],
        fill: Fill,
    ) -> list[Views | None]:
        """Add the location of each layer. Return the tensors to fill; None for a layer in files.

        on_device: the device bytes of each layer
        """
        views: list[Views | None] = []
        parts = zip(on_device, self._host.buffers, strict=True)
        for layer, (layout, plan, (device, host_part)) in enumerate(
            zip(layouts, plans, parts, strict=True)
        ):
            match plan.where:
                case Where.DEVICE:
                    self.locations.append(DeviceLocation(device))
                    views.append(layout.views(device))
                case Where.HOST | Where.PROCESSOR if not plan.device_bytes:
                    self.locations.append(HostLocation(host_part))
                    views.append(layout.views(host_part))
                case Where.FILE:
                    self.locations.append(FileLocation(_FilledLayer(layer, layout, fill)))
                    views.append(None)
                case _:  # a part on the device, and a part in host memory
                    self.locations.append(PartlyResidentLocation(device, host_part))
                    views.append(layout.joined(device, host_part))
        return views

    def close(self) -> None:
        self.locations.clear()
        self.in_passes.clear()
        self._memory.free(self._device)
        self._host.close()


class _FilledLayer:
    """OnDemand: the bytes of a layer as `fill` writes them."""

    def __init__(self, layer: int, layout: FlatLayout, fill: Fill) -> None:
        self._layer = layer
        self._layout = layout
        self._fill = fill

    def numel(self) -> int:
        return self._layout.nbytes

    def read(self, into: torch.Tensor) -> None:
        self._fill(self._layer, self._layout.views(into))


class StreamedWeights:
    """The weights for passes or prefills: the model asks for a layer and cannot tell where it was.
    A layer that the processor computes is in host memory.
    """

    def __init__(
        self,
        locations: Sequence[LayerLocation],
        layouts: Sequence[FlatLayout],
        conveyor: Conveyor,
        trace: Tracer,
        pools: Mapping[int, ExpertPool],
        *,
        prefills: bool,
    ) -> None:
        """locations, layouts: location and layout of each layer
        pools: of experts, which prefills fill and passes use
        """
        self._locations = locations
        self._layouts = layouts
        self._conveyor = conveyor
        self._trace = trace
        self._pools = pools
        self._prefills = prefills
        self._views: dict[tuple[int, int], Views] = {}

    @contextmanager
    def layer(self, index: int) -> Iterator[Views]:
        """Weights.layer. Raises LinkError."""
        location, pool = self._locations[index], self._pools.get(index)
        with self._conveyor.bring((WEIGHTS, index), location) as buffer:
            key = (index, buffer.data_ptr())
            if key not in self._views:
                self._views[key] = location.views(self._layouts[index], buffer)
            views = self._views[key]
            if self._prefills:
                views.note = pool and pool.note
            else:
                # None once pools were given up.
                views.pool = pool
            compute = self._trace.processor if location.by_processor else self._trace.compute
            with compute("layer", layer=index):
                yield views
            if pool is not None and self._prefills:
                pool.fill(buffer)


class ResidentWeights:
    """The layers of a model that drafts, all on the device, exact or not."""

    def __init__(
        self, store: WeightStore, draft_copies: DraftCopies | None = None, *, high: bool = False
    ) -> None:
        """draft_copies: draft copies, which replace the layers that they are of
        high: whether to read only the high bits of split layers, as is necessary if their low bits
            stream
        """
        instead = draft_copies.views if draft_copies else {}
        self._views: list[Views] = []
        for layer, (layout, location) in enumerate(
            zip(store.layouts, store.locations, strict=True)
        ):
            if layer in instead:
                self._views.append(instead[layer])
            else:
                self._views.append(location.draft_views(layout, high=high))

    def layer(self, index: int) -> AbstractContextManager[Views]:
        """Weights.layer."""
        return nullcontext(self._views[index])
