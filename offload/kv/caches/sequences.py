"""Several sequences in one forward, each with its own cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from triforce_offload.forward_batch import Cache, ForwardBatch


class SequenceCaches:
    """One cache for each sequence of a forward batch. A layer's products and its streamed weights
    are shared by all rows; attention is separate for each sequence.
    """

    def __init__(self, caches: Sequence[Cache]) -> None:
        self._caches = list(caches)
        self._batches: tuple[ForwardBatch, ...] = ()

    def attend(self, layer: int, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Cache.attend."""
        parts = self._parts(qkv, batch)
        return torch.cat([cache.attend(layer, *part) for cache, *part in parts], 1)

    def attend_window(self, layer: int, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Cache.attend_window."""
        parts = self._parts(qkv, batch)
        return torch.cat([cache.attend_window(layer, *part) for cache, *part in parts], 1)

    def keep(self, rows: Sequence[int]) -> None:
        """Cache.keep with a path of each sequence, given as rows of the whole forward batch."""
        first = 0
        paths = []
        for batch in self._batches:
            paths.append([row - first for row in rows if first <= row < first + batch.rows])
            batch.check_path(paths[-1])
            first += batch.rows
        if sum(map(len, paths)) != len(rows):
            raise RuntimeError(f"rows {list(rows)} are not all of a forward batch of {first}")
        for cache, path in zip(self._caches, paths, strict=True):
            cache.keep(path)

    def _parts(
        self, qkv: torch.Tensor, batch: ForwardBatch
    ) -> Iterator[tuple[Cache, torch.Tensor, ForwardBatch]]:
        """Yield each sequence's cache, with its rows and its forward batch."""
        self._batches = batch.alone
        rows = qkv.split([own.rows for own in self._batches])
        yield from zip(self._caches, rows, self._batches, strict=True)
