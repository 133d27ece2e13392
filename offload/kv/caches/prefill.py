"""Prefill into a KVStore, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax, with_sinks
from triforce_kernels.attention.selection import Selection, attend_text_selected
from triforce_kernels.attention.text import attend_text
from triforce_kernels.layer import rope_into
from triforce_kernels.recurrent.conv import Convolution
from triforce_kernels.recurrent.delta import DeltaRows
from triforce_offload.conveyor import Conveyor
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.block_format import keys_values
from triforce_offload.kv.caches.attend import PassAttention
from triforce_offload.kv.recent.marks import WHOLE, PromptPart
from triforce_offload.kv.recent.stores import NO_STORES, RecentStores
from triforce_offload.kv.scores import ChunkScores
from triforce_offload.kv.sizes import SCORED_TOKENS
from triforce_offload.kv.states.prefill import StatePrefill
from triforce_offload.kv.store import KVStore
from triforce_offload.kv.windows.prefill import WindowPrefill
from triforce_offload.schedule import kv_key


class PrefillCache:
    """The cache of a prefill of any length over a context of any length: a layer's KV is gathered
    on the device, then stored block by block.

    Streamed KV of a layer crosses the link once for the whole forward batch, and the new blocks
    cross once, to the host. Parts of the forward batch attend to everything before them without a
    mask, and to themselves causally.

    gathered: keys and values of the current layer, [sides, kv_heads, tokens, head_dim], of the
        context and the forward batch
    """

    def __init__(
        self,
        store: KVStore,
        conveyor: Conveyor,
        rows: int,
        gathered: torch.Tensor,
        scores: ChunkScores | None = None,
        recent: RecentStores = NO_STORES,
        part: PromptPart = WHOLE,
    ) -> None:
        """rows: number of rows of the whole forward batch, which is a `part` of a prompt
        gathered: flat uint8 device buffer for one layer's KV of the context and the forward batch
        scores: receives the score of each chunk by the last tokens, if given
        recent: the windows and states of the sequence
        """
        shape = store.shape
        self._store = store
        self._conveyor = conveyor
        self._rows = rows
        self._scores = scores
        self._windows = WindowPrefill(recent.windows, rows, part) if recent.windows else None
        self._states = StatePrefill(recent.states, rows, part) if recent.states else None
        self._ngrams = StatePrefill(recent.ngrams, rows, part) if recent.ngrams else None
        self._recent = recent
        self.gathered = gathered.view(shape.dtype).view(shape.size(store.length + rows))

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend. Raises LinkError."""
        query, keys, values = self._gathered(layer, qkv, batch, softmax)
        part = attend_text(query, keys, values, cap=softmax.cap)
        return with_sinks(part, softmax.sinks)

    def attend_selected(
        self,
        layer: int,
        qkv: torch.Tensor,
        index: torch.Tensor,
        batch: ForwardBatch,
        selection: Selection,
    ) -> torch.Tensor:
        """Cache.attend_selected. Raises LinkError."""
        store = self._recent.index
        end = len(store.write(layer, index[:, -1], batch.first))
        if end <= selection.all_seen:
            return self.attend(layer, qkv, batch)
        gathered = self._gathered(layer, qkv, batch, PLAIN)
        blocks = store.blocks_of(layer, end, selection)
        return attend_text_selected(selection, *gathered, index[:, :-1], blocks)

    def _gathered(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, softmax: Softmax
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gather and store a layer's KV up to the end of the batch. Return the rotated queries
        [heads, rows, head_dim], and these keys and values.
        """
        if not batch.first:
            self._bring_kept(layer)
        keys, values = keys_values(self.gathered)
        start = self._store.length + batch.first
        query = rope_into(qkv, *batch.rotation, keys, values, start)
        last = batch.end == self._rows
        if last and self._scores:
            self._score(layer, query[:, -SCORED_TOKENS:], softmax)
        end = start + batch.rows
        self._store.fill(layer, self.gathered, end, last=last)
        return query, keys[:, :end], values[:, :end]

    def attend_window(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend_window."""
        return self._windows.attend(layer, qkv, batch, softmax)

    def dense(self, layer: int, batch: ForwardBatch, *, has_window: bool = False) -> None:
        """Cache.dense: the keys are a prompt's, and go to the store afterwards."""

    def convolve(
        self,
        layer: int,
        inputs: torch.Tensor,
        convolution: Convolution,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Cache.convolve."""
        store, layer = self._recent.convolving(layer)
        part = self._states if store is self._recent.states else self._ngrams
        return part.convolve(layer, inputs, convolution, batch)

    def recur(self, layer: int, rows: DeltaRows, batch: ForwardBatch) -> torch.Tensor:
        """Cache.recur."""
        return self._states.recur(layer, rows, batch)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the rows of the prefill, all of them. Raises RuntimeError for other rows."""
        if list(rows) != list(range(self._rows)):
            raise RuntimeError(f"all {self._rows} rows of text that is read are kept")
        self._store.commit_fill(self._store.length + self._rows)
        for part in filter(None, (self._windows, self._states, self._ngrams)):
            part.commit()
        if self._recent.index:
            self._recent.index.keep(rows)

    def close(self) -> None:
        """Drop the gathered layer."""
        del self.gathered

    def _bring_kept(self, layer: int) -> None:
        """Gather the layer's KV of the context."""
        store, shape = self._store, self._store.shape
        size = shape.block_tokens
        for index, location in enumerate(store.locations(layer)):
            with self._conveyor.bring(kv_key(layer, index), location) as block:
                place = self.gathered[:, :, index * size : (index + 1) * size]
                store.copy(location, block, place)
        tail = store.tail(layer)
        self.gathered[:, :, store.length - tail.shape[2] : store.length] = tail

    def _score(self, layer: int, query: torch.Tensor, softmax: Softmax) -> None:
        """Score the chunks by the last tokens. query: [heads, tokens, head_dim]"""
        tokens, size = self.gathered.shape[2], self._store.shape.block_tokens
        whole = (tokens - query.shape[1]) // size
        blocks = self.gathered[:, :, : whole * size].unflatten(2, (whole, size)).transpose(1, 2)
        attention = PassAttention(query, self.gathered.shape[1], self._scores, tokens, softmax)
        attention.blocks(*keys_values(blocks))
        attention.end(layer, *keys_values(self.gathered[:, :, whole * size :]))
