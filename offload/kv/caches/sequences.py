"""Several sequences in one forward, each with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_offload.feed import Cache, Feed


class SequenceCaches:
    """One cache for each sequence of a feed: what is computed for all rows alike, a layer's
    products and what streams for them, is shared; attention is each one's own.
    """

    def __init__(self, caches: Sequence[Cache]) -> None:
        self._caches = list(caches)
        self._feeds: tuple[Feed, ...] = ()

    def attend(self, layer: int, qkv: torch.Tensor, feed: Feed) -> torch.Tensor:
        """Cache.attend."""
        self._feeds = feed.alone
        rows = qkv.split([own.rows for own in self._feeds])
        attended = [
            cache.attend(layer, part, own)
            for cache, part, own in zip(self._caches, rows, self._feeds, strict=True)
        ]
        return torch.cat(attended, 1)

    def keep(self, rows: Sequence[int]) -> None:
        """Cache.keep: of each sequence a path, by rows of the whole feed."""
        first = 0
        paths = []
        for feed in self._feeds:
            paths.append([row - first for row in rows if first <= row < first + feed.rows])
            feed.check_path(paths[-1])
            first += feed.rows
        if sum(map(len, paths)) != len(rows):
            raise RuntimeError(f"rows {list(rows)} are not all of a feed of {first}")
        for cache, path in zip(self._caches, paths, strict=True):
            cache.keep(path)
