"""What drafters take of a model's forwards: hidden states between layers, keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from triforce_core.model.heads.joins import Tapped
from triforce_core.model.layers import Mixer
from triforce_kernels.attention.attention import PLAIN, Softmax
from triforce_offload.forward_batch import Cache, ForwardBatch


class Taps:
    """Copies of what a drafter takes of a forward, side by side: hidden states, then for each layer
    its key heads and its value heads.

    states: [rows, numbers of a row]
    """

    def __init__(
        self,
        tapped: Tapped,
        states: torch.Tensor,
        rows: Sequence[range],
        hidden: int,
        heads: Sequence[int] = (),
    ) -> None:
        """states: room for the copies
        rows: rows of the forward that are copied, one range after another
        hidden: numbers of a row's hidden state
        heads: numbers of a row's keys and values, for each layer of `tapped.keys`
        """
        self.states = states
        self._layers = tapped.layers
        self._rows = rows
        # Place of the first number of a layer's keys.
        self._firsts: dict[int, int] = {}
        first = len(tapped.layers) * hidden
        for layer, numbers in zip(tapped.keys, heads, strict=True):
            self._firsts[layer] = first
            first += numbers

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """Copy the hidden states [all rows, hidden] that enter a layer, if the layer is tapped."""
        width = hidden.shape[1]
        for place, tapped in enumerate(self._layers):
            if tapped == layer:
                first = place * width
                for rows, states in self.parts():
                    states[:, first : first + width] = hidden[rows.start : rows.stop]

    def over(self, cache: Cache, layer: int, mixer: Mixer) -> Cache:
        """Return a cache for a layer, of which keys and values are copied if they are tapped."""
        first = self._firsts.get(layer)
        return cache if first is None else _TappedCache(self, cache, first, mixer.heads)

    def take_keys(self, first: int, batch: ForwardBatch, heads: torch.Tensor) -> None:
        """Copy the keys and values [rows of the batch, heads, head_dim] of a part of a forward.

        first: place of their first number
        """
        numbers = heads.flatten(1)
        for rows, states in self.parts():
            start, stop = max(rows.start, batch.first), min(rows.stop, batch.end)
            if start < stop:
                into = states[start - rows.start : stop - rows.start]
                into[:, first : first + numbers.shape[1]] = numbers[
                    start - batch.first : stop - batch.first
                ]

    def parts(self) -> Iterator[tuple[range, torch.Tensor]]:
        """Yield rows that follow one another, and their states."""
        return zip(self._rows, self.states.split([len(rows) for rows in self._rows]), strict=True)


class _TappedCache:
    """Cache: that of an attention layer, whose keys and values are copied as they come."""

    def __init__(self, taps: Taps, cache: Cache, first: int, query_heads: int) -> None:
        self._taps = taps
        self._cache = cache
        self._first = first
        self._query_heads = query_heads

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend."""
        self._take(qkv, batch)
        return self._cache.attend(layer, qkv, batch, softmax)

    def attend_window(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend_window."""
        self._take(qkv, batch)
        return self._cache.attend_window(layer, qkv, batch, softmax)

    def dense(self, layer: int, batch: ForwardBatch, *, has_window: bool = False) -> None:
        """Cache.dense: a caller that writes keys by itself would not show them."""

    def _take(self, qkv: torch.Tensor, batch: ForwardBatch) -> None:
        self._taps.take_keys(self._first, batch, qkv[:, self._query_heads :])
