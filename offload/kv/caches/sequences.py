"""Several sequences in one forward, each with its own cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax
from triforce_kernels.attention.selection import Selection
from triforce_kernels.recurrent.conv import Convolution
from triforce_kernels.recurrent.delta import DeltaRows
from triforce_offload.forward_batch import Cache, ForwardBatch

Rows = TypeVar("Rows", torch.Tensor, DeltaRows)


class SequenceCaches:
    """One cache for each sequence of a forward batch. A layer's products and its streamed weights
    are shared by all rows; attention is separate for each sequence.
    """

    def __init__(self, caches: Sequence[Cache]) -> None:
        self._caches = list(caches)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend."""
        parts = self._parts(qkv, batch)
        return torch.cat([cache.attend(layer, *part, softmax) for cache, *part in parts], 1)

    def attend_window(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend_window."""
        parts = self._parts(qkv, batch)
        return torch.cat([cache.attend_window(layer, *part, softmax) for cache, *part in parts], 1)

    def attend_selected(
        self,
        layer: int,
        qkv: torch.Tensor,
        index: torch.Tensor,
        batch: ForwardBatch,
        selection: Selection,
    ) -> torch.Tensor:
        """Cache.attend_selected."""
        indices = index.split([own.rows for own in batch.alone])
        parts = zip(self._parts(qkv, batch), indices, strict=True)
        return torch.cat(
            [
                cache.attend_selected(layer, rows, own, part, selection)
                for (cache, rows, part), own in parts
            ],
            1,
        )

    def dense(self, layer: int, batch: ForwardBatch, *, has_window: bool = False) -> None:
        """Cache.dense: each sequence has its own keys."""

    def convolve(
        self,
        layer: int,
        inputs: torch.Tensor,
        convolution: Convolution,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Cache.convolve."""
        parts = self._parts(inputs, batch)
        return torch.cat(
            [cache.convolve(layer, own, convolution, part) for cache, own, part in parts]
        )

    def recur(self, layer: int, rows: DeltaRows, batch: ForwardBatch) -> torch.Tensor:
        """Cache.recur."""
        parts = self._parts(rows, batch)
        return torch.cat([cache.recur(layer, *part) for cache, *part in parts])

    def _parts(self, rows: Rows, batch: ForwardBatch) -> Iterator[tuple[Cache, Rows, ForwardBatch]]:
        """Yield each sequence's cache, with its rows and its forward batch."""
        parts = rows.split([own.rows for own in batch.alone])
        yield from zip(self._caches, parts, batch.alone, strict=True)
