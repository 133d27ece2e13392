"""The source of a model's layers: a checkpoint that any thread can read on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from triforce_core.model.config import ModelConfig
from triforce_core.model.parts.ngrams import NGramTable
from triforce_core.model.parts.per_layer_inputs import PerLayerTable
from triforce_core.model.sharing.share import Share
from triforce_kernels.weights.block_types import BlockType
from triforce_kernels.weights.linear import Weight
from triforce_offload.errors import CannotSplitError
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.weights.draft_copies import DraftCopies
from triforce_offload.weights.layouts import Views


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

    def ngram_table(self) -> NGramTable | None: ...

    def per_layer_table(self) -> PerLayerTable | None: ...

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
    """A loader of layers. It also reads their draft copies where the cache has them."""

    def __init__(
        self,
        checkpoint: ReadableDrafter,
        memory: DeviceMemory,
        draft_copies: DraftCopies | None = None,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """report: called in any thread when a layer is loaded"""
        self._checkpoint = checkpoint
        self._memory = memory
        self._draft_copies = draft_copies
        self._report = report
        self._cannot_split: dict[int, CannotSplitError] = {}
        self._all_loaded = False

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

    def loaded(self, layer: int) -> None:
        """Read the draft copy of a layer that was loaded, if the cache has it."""
        if self._draft_copies and layer not in self._cannot_split:
            with torch.inference_mode(), self._memory.current():
                self._draft_copies.restore(layer)
        self._report()

    def end(self) -> None:
        """Finish loading. Raises CannotSplitError, with all matrices that cannot be split: their
        memory is invalid.
        """
        self._all_loaded = True
        if errors := list(self._cannot_split.values()):
            names = frozenset().union(*(error.names for error in errors))
            raise CannotSplitError(errors[0].path, names)
