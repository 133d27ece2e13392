"""Prefill of recurrent layers, layer by layer and part by part."""

from __future__ import annotations

import torch

from triforce_kernels.limits import DELTA_ROWS
from triforce_kernels.recurrent.conv import Convolution, convolve
from triforce_kernels.recurrent.delta import DeltaRows, delta_chunks, delta_rule, fold
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.recent.marks import WHOLE, Mark, MarkPlaces, PromptPart
from triforce_offload.kv.states.shape import FOLD_TOKENS, MOST_HELD, folded_tokens
from triforce_offload.kv.states.store import StateStore


class StatePrefill:
    """The part of a prefill that is in the recurrent layers.

    The store keeps its length until `commit`, but its states advance. If the prefill ends before
    that, the store can be cut to that length again, by a mark.
    """

    def __init__(self, store: StateStore, rows: int, part: PromptPart = WHOLE) -> None:
        """rows: number of rows of the whole forward batch, which is a `part` of a prompt"""
        self._store = store
        self._rows = rows
        self._places = MarkPlaces(store.marks, store.length, rows, part)
        self._marks: dict[int, Mark] = {}
        self._recent = store.inputs[0, :0]
        self._held = 0
        store.begin_fill(goes_on=part.before > 0)

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
        kept = before + length - self._folded(length)
        # A copy, so that the inputs before it are released.
        self._recent = self._recent[-before - MOST_HELD :].clone()
        if batch.end == self._rows:
            store.fill_inputs(layer, self._recent[-kept:])
        if not store.shape.value_heads:
            self._end_part(layer, batch)
        return out

    def recur(self, layer: int, rows: DeltaRows, batch: ForwardBatch) -> torch.Tensor:
        """Cache.recur."""
        if not batch.first:
            self._held = self._store.end
        begin, end = self._store.length + batch.first, self._store.length + batch.end
        # What completes a chunk, whole chunks that are folded by the end of the part, and the rest.
        first = min(-begin % FOLD_TOKENS, batch.rows)
        whole = max(0, self._folded(end) - begin - first)
        some, chunks, rest = rows.split((first, whole, batch.rows - first - whole))
        outs = [self._leave_behind(layer, some)]
        self._fold(layer, begin + first, end)
        for part in chunks.split([DELTA_ROWS] * (whole // DELTA_ROWS) + [whole % DELTA_ROWS]):
            outs.append(delta_chunks(part, self._store.state[layer], FOLD_TOKENS))
        outs.append(self._leave_behind(layer, rest))
        self._end_part(layer, batch)
        return torch.cat(outs)

    def commit(self) -> None:
        """Make the rows tokens of the text."""
        store = self._store
        length = store.length + self._rows
        store.commit_fill(length, length - self._folded(length))
        for mark in self._marks.values():
            store.marks.add(mark)

    def _folded(self, length: int) -> int:
        """Return how many of the first tokens are folded when the text has grown to a length."""
        return max(self._store.start, folded_tokens(length))

    def _leave_behind(self, layer: int, rows: DeltaRows) -> torch.Tensor:
        """Compute rows that are not folded yet."""
        if not len(rows.values):
            return rows.values
        out = delta_rule(rows, self._store.state[layer], self._store.left(layer), self._held)
        self._held += len(rows.values)
        return out

    def _fold(self, layer: int, length: int, end: int) -> None:
        """Of the rows that are left behind, the last of which is the last of `length` tokens, fold
        those that are folded when the text has grown to `end` tokens, and move the others.
        """
        rows = min(length, self._folded(end)) - (length - self._held)
        if rows <= 0:
            return
        left, last = self._store.left(layer), self._held - rows
        firsts = range(0, rows, FOLD_TOKENS)
        fold(self._store.state[layer], [left.part(at, at + FOLD_TOKENS) for at in firsts])
        for each in left:
            each[:, :last] = each[:, rows : self._held].clone()
        self._held = last

    def _end_part(self, layer: int, batch: ForwardBatch) -> None:
        """Copy the layer to a mark, if one belongs at the end of this chunk."""
        if not self._places.due(batch.first, batch.end):
            return
        store, length = self._store, self._store.length + batch.end
        held = length - self._folded(length)
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
