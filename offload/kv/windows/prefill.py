"""Prefill of layers with a window, layer by layer and part by part."""

from __future__ import annotations

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax, with_sinks
from triforce_kernels.attention.text import attend_text
from triforce_kernels.layer import rope_into
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.recent.marks import WHOLE, Mark, MarkPlaces, PromptPart
from triforce_offload.kv.windows.store import WindowStore


class WindowPrefill:
    """The part of a prefill that is in the layers with a window.

    The store keeps its length until `commit`. If the prefill ends before that, the store can be cut
    to that length again, by a mark.
    """

    def __init__(self, store: WindowStore, rows: int, part: PromptPart = WHOLE) -> None:
        """rows: number of rows of the whole forward batch, which is a `part` of a prompt"""
        self._store = store
        self._rows = rows
        self._recent = store.rows[0, :, :, :0]
        self._places = MarkPlaces(store.marks, store.length, rows, part)
        self._marks: dict[int, torch.Tensor] = {}
        store.begin_fill(goes_on=part.before > 0)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend_window."""
        store, shape = self._store, self._store.shape
        if not batch.first:
            self._recent = store.rows[layer, :, :, max(0, store.end - shape.held) : store.end]
        before = self._recent.shape[2]
        size = (2, shape.kv_heads, before + batch.rows, shape.head_dim)
        keys, values = whole = qkv.new_empty(size)
        whole[:, :, :before] = self._recent
        query = rope_into(qkv, *batch.rotation, keys, values, before)
        # A copy, so that the rows before it are released.
        self._recent = whole[:, :, -shape.held :].clone()
        if batch.end == self._rows:
            store.fill(layer, self._recent)
        if self._places.due(batch.first, batch.end):
            self._mark(layer, store.length + batch.end)
        # The text before the window is gone; keys keep their places.
        first = store.length + batch.first - before
        part = attend_text(query, keys, values, shape.window, first=first, cap=softmax.cap)
        return with_sinks(part, softmax.sinks)

    def commit(self) -> None:
        """Make the rows tokens of the text."""
        store = self._store
        store.commit_fill(store.length + self._rows, self._recent.shape[2])
        for length, rows in self._marks.items():
            store.marks.add(Mark(length, length - rows.shape[3], (rows,)))

    def _mark(self, layer: int, length: int) -> None:
        if length not in self._marks:
            size = (self._store.shape.layers, *self._recent.shape)
            self._marks[length] = torch.empty(size, dtype=self._recent.dtype)
        self._marks[length][layer] = self._recent
