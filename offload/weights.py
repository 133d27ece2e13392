"""The weights of a model's layers: resident in device memory, or streamed through slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from offload.conveyor import Conveyor, Transfer
from offload.layouts import FlatLayout
from offload.link.trace import Tracer
from offload.memory.device import Allocation, DeviceMemory
from offload.memory.host import HostBlocks, HostMemory

RING = "weights"

Views = Mapping[str, torch.Tensor]
Fill = Callable[[int, Views], None]


class WeightStore:
    """Every layer as one flat buffer of the same layout, on the device or in host memory."""

    def __init__(
        self,
        layout: FlatLayout,
        layers: int,
        streamed: Collection[int],
        memory: DeviceMemory,
        host: HostMemory,
        fill: Fill,
    ) -> None:
        """fill(layer, views) writes a layer's tensors where they will live.

        Raises DoesNotFitError before anything is read.
        """
        self.layout = layout
        self._memory = memory
        self._streamed = frozenset(streamed)
        self._host = HostBlocks(layout.nbytes, host)
        self._host.reserve(len(self._streamed))
        self._device: Allocation = memory.allocate(
            layout.nbytes * (layers - len(self._streamed)), "resident weights"
        )
        resident = iter(self._device.bytes.split(layout.nbytes))
        self._host_buffers: dict[int, torch.Tensor] = {}
        self._resident_views: dict[int, Views] = {}
        for layer in range(layers):
            if layer in self._streamed:
                self._host_buffers[layer] = self._host.take()
                fill(layer, layout.views(self._host_buffers[layer]))
            else:
                self._resident_views[layer] = layout.views(next(resident))
                fill(layer, self._resident_views[layer])

    @property
    def resident_layers(self) -> int:
        return len(self._resident_views)

    @property
    def host_bytes(self) -> int:
        return self._host.nbytes

    def transfers(self, layer: int) -> tuple[Transfer, ...]:
        """What must be copied in before `layer` can be computed: one transfer, or none."""
        if layer not in self._host_buffers:
            return ()
        return (Transfer((RING, layer), RING, self._host_buffers[layer]),)

    def resident(self, layer: int) -> Views | None:
        return self._resident_views.get(layer)

    def close(self) -> None:
        self._resident_views.clear()
        self._host_buffers.clear()
        self._memory.free(self._device)
        self._host.close()


class WeightPass:
    """A pass's view of the weights: the model asks for a layer and cannot tell where it was."""

    def __init__(self, store: WeightStore, conveyor: Conveyor, trace: Tracer) -> None:
        self._store = store
        self._conveyor = conveyor
        self._trace = trace
        self._slot_views: dict[int, Views] = {}

    @contextmanager
    def layer(self, index: int) -> Iterator[Views]:
        """The tensors of layer `index`, valid inside the block. Layers are asked for in order."""
        views = self._store.resident(index)
        if views is not None:
            with self._trace.compute("layer", layer=index):
                yield views
            return
        key = (RING, index)
        buffer = self._conveyor.acquire(key)
        views = self._slot_views.get(buffer.data_ptr())
        if views is None:
            views = self._slot_views[buffer.data_ptr()] = self._store.layout.views(buffer)
        with self._trace.compute("layer", layer=index):
            yield views
        self._conveyor.release(key)


class ResidentWeights:
    """The layers of a store that streams none: what a level on the device computes with."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    def layer(self, index: int) -> AbstractContextManager[Views]:
        """The tensors of layer `index`."""
        return nullcontext(self._store.resident(index))
