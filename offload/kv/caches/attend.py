"""Attention of a pass over a KVStore, at any placement.

Attention runs block by block and in token order at every placement, so that streamed and resident
KV give bitwise equal results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax, masses, merge, with_sinks
from triforce_kernels.attention.dense import DenseKeys, attend_dense
from triforce_kernels.attention.selection import (
    Newest,
    Selection,
    attend_selected,
    slots_of_rows,
)
from triforce_kernels.attention.streaming import Running, attend_blocks, attend_tail
from triforce_kernels.layer import rope_into
from triforce_kernels.recurrent.conv import Convolution
from triforce_kernels.recurrent.delta import DeltaRows
from triforce_offload.conveyor import Conveyor
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.block_format import keys_values
from triforce_offload.kv.caches.processor import Blocks, PendingAttention, ProcessorAttention
from triforce_offload.kv.recent.stores import NO_STORES, RecentStores
from triforce_offload.kv.scores import ChunkScores
from triforce_offload.kv.store import KVStore
from triforce_offload.schedule import kv_key


class PassCache:
    """The cache of a pass: attends to the whole context and to the pass's own rows.

    index: index of this sequence in the pass
    """

    def __init__(
        self,
        store: KVStore,
        conveyor: Conveyor,
        scores: ChunkScores | None = None,
        recent: RecentStores = NO_STORES,
        processor: ProcessorAttention | None = None,
    ) -> None:
        """scores: collects the score of each chunk of keys, if given
        recent: the windows and states of the sequence
        processor: attends to blocks in host memory that the store leaves to it
        """
        self._store = store
        self._recent = recent
        self._conveyor = conveyor
        self._scores = scores
        self._processor = processor
        self._batch: ForwardBatch | None = None
        # Of the forward of that batch, behind a text of that length.
        self._seen: tuple[ForwardBatch, int, Newest] | None = None
        self.index = 0

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend. Raises LinkError."""
        dense = self.dense(layer, batch)
        if dense is not None and batch.visible is None:
            # A sequence that fills no block has nothing to merge.
            return attend_dense(dense, qkv, batch.rotation, softmax)
        store, scores = self._store, self._scores
        keys, values = store.room(layer, batch.end)
        end = store.tail_length + batch.end
        query = rope_into(qkv, *batch.rotation, keys, values, store.tail_length + batch.first)
        self._batch = batch
        locations = store.locations(layer)
        seen = len(locations) * store.shape.block_tokens + end
        attention = PassAttention(query, store.shape.kv_heads, scores, seen, softmax)
        elsewhere = self._processor.blocks(store, layer) if self._processor else range(0)
        if elsewhere:
            chosen = locations[elsewhere.start : elsewhere.stop]
            blocks = Blocks(layer, elsewhere.start, chosen)
            attention.leave_to(self._processor, blocks, store.shape.block_tokens)
        for run in store.runs(layer):
            attention.blocks(*run)
        for index in range(store.on_device(layer), len(locations)):
            if index in elsewhere:
                attention.skip(store.shape.block_tokens)
                continue
            with self._conveyor.bring(kv_key(layer, index, self.index), locations[index]) as block:
                key, value = keys_values(store.read(locations[index], block))
                attention.blocks(key.unsqueeze(0), value.unsqueeze(0))
                store.settle(layer, index, block)
        return attention.end(layer, keys[:, :end], values[:, :end], batch.visible)

    def dense(
        self, layer: int, batch: ForwardBatch, *, has_window: bool = False
    ) -> DenseKeys | None:
        """Cache.dense: full attention only of a sequence that fills no block."""
        store, windows = self._store, self._recent.windows
        if has_window:
            found = windows.dense(layer, batch, windows.end)
        elif self._scores is not None or store.locations(layer):
            return None
        else:
            found = DenseKeys(*store.room(layer, batch.end), store.tail_length + batch.first)
        self._batch = batch
        return found

    def attend_window(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend_window."""
        windows, self._batch = self._recent.windows, batch
        return windows.attend(layer, qkv, batch, windows.end, softmax)

    def convolve(
        self,
        layer: int,
        inputs: torch.Tensor,
        convolution: Convolution,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Cache.convolve."""
        store, layer = self._recent.convolving(layer)
        return store.convolve(layer, inputs, convolution, batch, store.end)

    def attend_selected(
        self,
        layer: int,
        qkv: torch.Tensor,
        index: torch.Tensor,
        batch: ForwardBatch,
        selection: Selection,
    ) -> torch.Tensor:
        """Cache.attend_selected."""
        store = self._recent.index
        vectors = store.write(layer, index[:, -1], batch.first)
        if len(vectors) <= selection.all_seen:
            return self.attend(layer, qkv, batch)
        keys = self.dense(layer, batch)
        query = rope_into(qkv, *batch.rotation, keys.key, keys.value, keys.start)
        blocks = store.blocks_of(layer, store.length, selection)
        newest = self._newest(batch, selection.block, store.length)
        slots = slots_of_rows(selection, index[:, :-1], blocks, vectors, newest)
        return attend_selected(query, keys.key, keys.value, *slots)

    def _newest(self, batch: ForwardBatch, block: int, length: int) -> Newest:
        """Return the newest tokens that rows see, found once for all layers of a forward."""
        if self._seen is None or self._seen[0] is not batch or self._seen[1] != length:
            newest = Newest.of(block, length, batch.lineage(batch.deepest))
            self._seen = (batch, length, newest)
        return self._seen[2]

    def recur(self, layer: int, rows: DeltaRows, batch: ForwardBatch) -> torch.Tensor:
        """Cache.recur."""
        states = self._recent.states
        return states.recur(layer, rows, batch, states.end)

    def ran(self, batch: ForwardBatch) -> None:
        """Take over a forward batch that a `FixedPass` computed, for `keep`."""
        self._batch = batch

    def keep(self, rows: Sequence[int]) -> None:
        """Keep a path of the last forward batch, row after row, and drop its other rows.

        Raises RuntimeError, before any change, if the rows are not a path of the batch.
        """
        if self._batch is None:
            raise RuntimeError("keep before a pass")
        self._batch.check_path(rows)
        self._store.keep(rows)
        self._recent.keep(rows)
        self._batch = None


class PassAttention:
    """One layer's attention of some rows, as the keys come: blocks in token order, then the tail.

    Scores of chunks are collected on the way.
    """

    def __init__(
        self,
        query: torch.Tensor,
        kv_heads: int,
        scores: ChunkScores | None,
        keys: int,
        softmax: Softmax = PLAIN,
    ) -> None:
        """query: [heads, rows, head_dim]
        keys: number of all keys that will come, the rows' own included
        softmax: see `Cache.attend`
        """
        self._sinks = softmax.sinks
        heads, self._tokens, head_dim = self._shape = query.shape
        self._rows = query.reshape(kv_heads, heads // kv_heads * self._tokens, head_dim)
        self._running = Running.of(self._rows, softmax.cap)
        self._scores = scores
        self._keys = keys
        self._buffer = scores.buffer(self._rows, keys) if scores else None
        self._pending: PendingAttention | None = None

    def leave_to(self, processor: ProcessorAttention, blocks: Blocks, tokens: int) -> None:
        """Leave blocks of `tokens` tokens to the processor, which begins at once. `skip` them when
        their turn comes.
        """
        into = self._buffer
        if into:
            into = into.at(blocks.first * (tokens // into.size))
        self._pending = processor.begin(self._rows, blocks, into, self._running.cap)

    def skip(self, tokens: int) -> None:
        """Go on behind a block of `tokens` tokens that the processor has."""
        self._running.keys += tokens
        if self._buffer:
            self._buffer = self._buffer.at(self._buffer.first + tokens // self._buffer.size)

    def blocks(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Attend to blocks that all rows see, [blocks, kv_heads, tokens, head_dim].

        If chunks are scored, a block is a whole number of chunks: only the tail may end in a
        partial chunk.
        """
        attend_blocks(self._running, self._rows, key, value, self._buffer)
        if self._buffer:
            chunks = key.shape[0] * (key.shape[2] // self._buffer.size)
            self._buffer = self._buffer.at(self._buffer.first + chunks)

    def end(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the tail, keys and values [kv_heads, tokens, head_dim], which ends with the
        rows' own. Pass the scores on and return the whole attention, [heads, rows, head_dim].

        visible: which of their own keys each row sees, if the rows are a tree
        place: of the rows' own keys, if the tail does not end with them; see `attend_tail`
        """
        part = attend_tail(
            self._running,
            self._rows,
            key,
            value,
            self._tokens,
            end=place,
            visible=visible,
            scores=self._buffer,
        )
        if self._pending is not None:
            part = merge([part, self._pending.take(part.out.device)])
        if self._scores:
            lse = masses(part, self._sinks)
            self._scores.end_layer(layer, lse, self._tokens, self._keys)
        return with_sinks(part, self._sinks).reshape(self._shape)
