"""The weights of a model's layers: on the device, or streamed through slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from offload.conveyor import Conveyor
from offload.homes import DeviceHome, Home, HostHome
from offload.layouts import FlatLayout, Views
from offload.link.trace import Tracer
from offload.memory.device import Allocation, DeviceMemory
from offload.memory.host import HostBuffers, HostMemory
from offload.schedule import WEIGHTS
from offload.substitutes import Substitutes

# Layers that are read and dequantised at a time.
_READERS = 4
Fill = Callable[[int, Views], None]


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
    ) -> None:
        """fill(layer, views) writes a layer's tensors where they will live; threads call it.

        Raises DoesNotFitError before anything is read.
        """
        self.layouts = layouts
        self._memory = memory
        sizes = [layout.nbytes for layout in layouts]
        resident = [i for i in range(len(layouts)) if i not in streamed]
        self._host = HostBuffers([sizes[i] for i in range(len(layouts)) if i in streamed], host)
        try:
            self._device: Allocation = memory.allocate(
                sum(sizes[i] for i in resident), "resident weights"
            )
        except BaseException:
            self._host.close()
            raise
        on_device = iter(self._device.bytes.split([sizes[i] for i in resident]))
        on_host = iter(self._host.buffers)
        self.homes: list[Home] = []
        views = []
        for layer, layout in enumerate(layouts):
            buffer = next(on_host if layer in streamed else on_device)
            self.homes.append((HostHome if layer in streamed else DeviceHome)(buffer))
            views.append(layout.views(buffer))
        try:
            with ThreadPoolExecutor(_READERS, "weights") as readers:
                # What fails first ends it; layers that are not begun are left.
                for _ in readers.map(fill, range(len(views)), views):
                    pass
        except BaseException:
            self.close()
            raise

    @property
    def resident_layers(self) -> int:
        return sum(home.source is None for home in self.homes)

    @property
    def layer_bytes(self) -> list[int]:
        return [layout.nbytes for layout in self.layouts]

    def close(self) -> None:
        self.homes.clear()
        self._memory.free(self._device)
        self._host.close()


class StreamedWeights:
    """The weights as a pass gets them: the model asks for a layer and cannot tell where it was."""

    def __init__(self, store: WeightStore, conveyor: Conveyor, trace: Tracer) -> None:
        self._store = store
        self._conveyor = conveyor
        self._trace = trace
        self._views: dict[tuple[int, int], Views] = {}

    @contextmanager
    def layer(self, index: int) -> Iterator[Views]:
        """Weights.layer. Raises LinkError."""
        home = self._store.homes[index]
        with self._conveyor.bring((WEIGHTS, index), home) as buffer:
            key = (index, buffer.data_ptr())
            if key not in self._views:
                self._views[key] = self._store.layouts[index].views(buffer)
            with self._trace.compute("layer", layer=index):
                yield self._views[key]


class ResidentWeights:
    """Layers that are all on the device, exact or not: what a level that drafts computes with."""

    def __init__(self, store: WeightStore, substitutes: Substitutes | None = None) -> None:
        """substitutes: of layers that are taken from there, streamed ones or more."""
        instead = substitutes.views if substitutes else {}
        self._views = [
            instead[layer] if layer in instead else layout.views(home.read(None))
            for layer, (layout, home) in enumerate(zip(store.layouts, store.homes, strict=True))
        ]

    def layer(self, index: int) -> AbstractContextManager[Views]:
        """Weights.layer."""
        return nullcontext(self._views[index])
