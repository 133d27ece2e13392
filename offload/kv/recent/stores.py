"""The recent stores of a sequence, together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triforce_offload.kv.index.store import IndexStore
from triforce_offload.kv.recent.store import RecentStore
from triforce_offload.kv.states.store import StateStore
from triforce_offload.kv.windows.store import WindowStore


@dataclass(frozen=True, eq=False)
class RecentStores:
    """The stores of a sequence's layers that do not keep the KV of all its tokens.

    windows: of layers with a window, or None
    states: of recurrent layers, or None
    ngrams: inputs of the convolution behind n-gram embeddings, or None
    index: of the layers whose tokens choose their keys, or None
    """

    windows: WindowStore | None = None
    states: StateStore | None = None
    ngrams: StateStore | None = None
    index: IndexStore | None = None

    def __iter__(self) -> Iterator[RecentStore]:
        yield from filter(None, (self.windows, self.states, self.ngrams, self.index))

    def convolving(self, layer: int) -> tuple[StateStore, int]:
        """Return the store with the inputs of a convolution, and the layer's index in it: the
        convolution behind n-gram embeddings has the number after those of recurrent layers.
        """
        if self.ngrams and layer == self.states.shape.layers:
            return self.ngrams, 0
        return self.states, layer

    def keep(self, rows: Sequence[int]) -> None:
        """Make these rows of the last forward, in this order, tokens of the text."""
        for store in self:
            store.keep(rows)

    def reachable(self, tokens: int) -> int:
        """Return the greatest length up to `tokens` to which the text can be cut."""
        for store in self:
            if (reached := store.reachable(tokens)) < tokens:
                return self.reachable(reached)
        return tokens

    def want(self, length: int) -> None:
        """Ask for a mark at this length, see `RecentStore.want`."""
        for store in self:
            store.want(length)

    def roll_back(self, tokens: int) -> None:
        """Cut the text to its first `tokens` tokens, a length that is `reachable`."""
        for store in self:
            store.roll_back(tokens)

    def close(self) -> None:
        """Free the memory."""
        for store in self:
            store.close()


# The stores of a model in which every layer keeps the KV of all tokens.
NO_STORES = RecentStores()
