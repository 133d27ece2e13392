"""The source of a model's layers: a checkpoint that any thread can read on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from triforce_core.model.config import ModelConfig
from triforce_core.model.sharing.share import Share
from triforce_kernels.weights.block_types import BlockType
from triforce_kernels.weights.linear import Weight
from triforce_offload.errors import CannotSplitError
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.memory.host import check_available
from triforce_offload.weights.int4_copies import Int4Copies
from triforce_offload.weights.layouts import FlatLayout, Views


class Readable(Protocol):
    """The source of weights: a Checkpoint, or random numbers.

    files: files that contain the weights, if there are any
    """

    config: ModelConfig

    @property
    def stored_dtype(self) -> str | None: ...

    @property
    def files(self) -> Sequence[Path]: ...

    def pieces(self, name: str) -> Sequence[tuple[int, BlockType | None]]: ...

    def read_layer(self, layer: int, views: Views) -> None: ...

    def read(self, name: str, into: Weight) -> None: ...

    def rope_factors(self) -> torch.Tensor | None: ...

    def shared(self, share: Share) -> Readable: ...

    def reopened(self) -> Readable: ...

    def close(self) -> None: ...


class ReadableHead(Protocol):
    """The source of the weights of a head, see `model.heads.joins`."""

    config: ModelConfig

    def pieces(self, name: str) -> Sequence[tuple[int, BlockType | None]]: ...

    def read_layer(self, layer: int, views: Views) -> None: ...

    def read(self, name: str, into: Weight) -> None: ...

    def tokens(self) -> torch.Tensor | None:
        """Return the model's token of each token of the head's output, [vocab] int64; None if they
        are the same.
        """


# What drafts: a model of its own, or a head.
ReadableDrafter = Readable | ReadableHead


class LayerSource:
    """A loader of layers, which also creates their int4 draft copies."""

    def __init__(
        self,
        checkpoint: ReadableDrafter,
        memory: DeviceMemory,
        layouts: Sequence[FlatLayout],
        int4_copies: Int4Copies | None = None,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """layouts: layout of each layer
        report: called in any thread when a layer is loaded
        """
        self._checkpoint = checkpoint
        self._memory = memory
        self._layouts = layouts
        self._int4_copies = int4_copies
        self._report = report
        self._cannot_split: dict[int, CannotSplitError] = {}
        self._all_loaded = False
        # At most one layer that is not kept on the host is in host memory at a time.
        self._reading = threading.Lock()

    def fill(self, layer: int, views: Views) -> None:
        """Read a layer's tensors into `views`.

        Raises CheckpointError. While the model is loading, a matrix that cannot be split is
        reported by `end` instead, after all layers were read.
        """
        # Both settings are per thread.
        with torch.inference_mode(), self._memory.current():
            try:
                self._checkpoint.read_layer(layer, views)
            except CannotSplitError as error:
                if self._all_loaded:
                    raise
                self._cannot_split[layer] = error

    def loaded(self, layer: int, views: Views | None) -> None:
        """Create the int4 copy of a layer that was loaded. views: None if the layer stays in its
        file
        """
        if layer in self._cannot_split:
            # The memory of this layer is invalid, so no copy of it may be kept.
            self._report()
            return
        int4_copies = self._int4_copies
        with torch.inference_mode(), self._memory.current():
            if int4_copies and layer in int4_copies.views and not int4_copies.restore(layer):
                with self._exact(layer, views) as exact:
                    int4_copies.make(layer, exact)
        self._report()

    def end(self) -> None:
        """Finish loading. Raises CannotSplitError, with all matrices that cannot be split: their
        memory is invalid.
        """
        self._all_loaded = True
        if errors := list(self._cannot_split.values()):
            names = frozenset().union(*(error.names for error in errors))
            raise CannotSplitError(errors[0].path, names)

    @contextmanager
    def _exact(self, layer: int, views: Views | None) -> Iterator[Views]:
        if views is not None:
            yield views
            return
        with self._reading:
            size = self._layouts[layer].nbytes
            check_available(size, "host memory for a layer that is read")
            views = self._layouts[layer].views(torch.empty(size, dtype=torch.uint8))
            self._checkpoint.read_layer(layer, views)
            yield views
