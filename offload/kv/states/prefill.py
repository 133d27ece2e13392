"""Prefill of recurrent layers, layer by layer and part by part."""

from __future__ import annotations

import torch

from triforce_kernels.limits import DELTA_ROWS
from triforce_kernels.recurrent.conv import Convolution, convolve
from triforce_kernels.recurrent.delta import DeltaRows, delta_chunks, delta_rule, fold
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.recent.marks import Mark, MarkPlaces
from triforce_offload.kv.states.shape import FOLD_TOKENS
from triforce_offload.kv.states.store import StateStore


class StatePrefill:
    """The part of a prefill that is in the recurrent layers.

    The store keeps its length until `commit`, but its states advance. If the prefill ends before
    that, the store can be cut to that length again, by a mark.
    """

    def __init__(self, store: StateStore, rows: int) -> None:
        """rows: number of rows of the whole forward batch"""
        self._store = store
        self._rows = rows
        self._places = MarkPlaces(len(store.marks), rows)
        self._marks: dict[int, Mark] = {}
        self._recent = store.inputs[0, :0]
        self._held = 0
        store.begin_fill()

    def convolve(
        self,
        layer: int,
        inputs: torch.Tensor,
        convolution: Convolution,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Cache.convolve."""
        store = self._store
        before = store.shape.before
        if not batch.first:
            self._recent = store.inputs[layer, : before + store.end]
        self._recent = torch.cat((self._recent, inputs))
        out = convolve(self._recent[-before - batch.rows :], convolution, None)
        length = store.length + batch.end
        kept = before + length % FOLD_TOKENS
        # A copy, so that the inputs before it are released.
        self._recent = self._recent[-before - FOLD_TOKENS :].clone()
        if batch.end == self._rows:
            store.fill_inputs(layer, self._recent[-kept:])
        if not store.shape.value_heads:
            self._end_part(layer, batch)
        return out

    def recur(self, layer: int, rows: DeltaRows, batch: ForwardBatch) -> torch.Tensor:
        """Cache.recur."""
        if not batch.first:
            self._held = self._store.end
        out = rows.values.new_empty(rows.values.shape)
        sizes = self._parts(batch.rows)
        for part, into in zip(rows.split(sizes), out.split(sizes), strict=True):
            into.copy_(self._compute(layer, part))
        self._end_part(layer, batch)
        return out

    def commit(self) -> None:
        """Make the rows tokens of the text."""
        store = self._store
        length = store.length + self._rows
        store.commit_fill(length, length % FOLD_TOKENS)
        for mark in self._marks.values():
            store.marks.add(mark)

    def _parts(self, rows: int) -> list[int]:
        """Return the sizes of the parts in which rows are computed: what completes a chunk, whole
        chunks, and the rest.
        """
        sizes = [min(FOLD_TOKENS - self._held, rows)] if self._held else []
        left = rows - sum(sizes)
        whole = left // FOLD_TOKENS * FOLD_TOKENS
        sizes += [min(DELTA_ROWS, whole - first) for first in range(0, whole, DELTA_ROWS)]
        return [size for size in (*sizes, left - whole) if size]

    def _compute(self, layer: int, rows: DeltaRows) -> torch.Tensor:
        """Return the output of a part. Rows that are no whole chunk are left behind; those that
        complete one are folded.
        """
        state, count = self._store.state[layer], len(rows.keys)
        if not self._held and not count % FOLD_TOKENS:
            return delta_chunks(rows, state, FOLD_TOKENS)
        left = self._store.left(layer)
        out = delta_rule(rows, state, left, self._held)
        self._held += count
        if self._held == FOLD_TOKENS:
            fold(state, left.part(0, FOLD_TOKENS))
            self._held = 0
        return out

    def _end_part(self, layer: int, batch: ForwardBatch) -> None:
        """Copy the layer to a mark, if one belongs at the end of this part."""
        if batch.end == self._rows or not self._places.due(batch.first, batch.end):
            return
        store, length = self._store, self._store.length + batch.end
        held = length % FOLD_TOKENS
        kept = store.shape.before + held
        rows = (each[layer, :, :held] for each in store.rows)
        parts = (store.state[layer], *rows, self._recent[-kept:])
        if length not in self._marks:
            sizes = ((store.shape.layers, *part.shape) for part in parts)
            whole = tuple(
                torch.empty(size, dtype=part.dtype) for size, part in zip(sizes, parts, strict=True)
            )
            self._marks[length] = Mark(length, length - held, whole)
        for to, part in zip(self._marks[length].parts, parts, strict=True):
            to[layer] = part
