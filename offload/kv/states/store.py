"""The states of one sequence in its recurrent layers: always on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_kernels.recurrent.conv import Convolution, convolve
from triforce_kernels.recurrent.delta import DeltaRows, LeftRows, delta_rule, fold
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.recent.marks import Mark
from triforce_offload.kv.recent.store import RecentStore
from triforce_offload.kv.states.shape import FOLD_TOKENS, StateShape, folded_tokens
from triforce_offload.memory.device import DeviceMemory, put
from triforce_offload.weights.formats import aligned


class StateStore(RecentStore):
    """The state of every recurrent layer, and the rows of the last tokens that are not folded yet.

    No forward writes the state: it computes its rows from the state and from the rows before, and
    leaves them behind. So a rejected row costs nothing, and rows may be a tree. `keep` folds rows
    into the state at multiples of FOLD_TOKENS.

    state: [layers, value_heads, key_dim, value_dim] float32, after the first `start` tokens
    rows: keys, updates and decays of rows, [layers, heads, capacity, ...] each
    inputs: inputs of convolutions, [layers, taps - 1 + capacity, channels]; rows follow those of
        the tokens before them
    """

    def __init__(self, shape: StateShape, max_pass_tokens: int, memory: DeviceMemory) -> None:
        """Raises DoesNotFitError."""
        capacity = shape.capacity(max_pass_tokens)
        super().__init__(capacity, past=0)
        self.shape = shape
        self._memory = memory
        self._allocation = memory.allocate(shape.device_bytes(max_pass_tokens), "states")
        free = self._allocation.bytes.zero_()

        def taken(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            nonlocal free
            size = torch.Size((shape.layers, *sizes))
            nbytes = size.numel() * dtype.itemsize
            own, free = free[:nbytes], free[aligned(nbytes) :]
            return own.view(dtype).view(size)

        self.state = taken(torch.float32, shape.value_heads, shape.key_dim, shape.value_dim)
        self.rows = LeftRows(
            taken(torch.float32, shape.key_heads, capacity, shape.key_dim),
            taken(torch.float32, shape.value_heads, capacity, shape.value_dim),
            taken(torch.float32, shape.value_heads, capacity),
        )
        self.inputs = taken(shape.dtype, shape.before + capacity, shape.channels)

    def convolve(
        self,
        layer: int,
        inputs: torch.Tensor,
        convolution: Convolution,
        batch: ForwardBatch,
        end: int | torch.Tensor,
    ) -> torch.Tensor:
        """Cache.convolve.

        end: index of the row of the whole batch's first token, a number or [1] int64 on the device
        Raises RuntimeError if there is no room.
        """
        held, before = self.inputs[layer], self.shape.before
        if isinstance(end, torch.Tensor):
            places = end + before + torch.arange(batch.rows, device=held.device)
            held.index_copy_(0, places, inputs)
            return convolve(held, convolution, end + before + batch.lineage(self.shape.taps))
        self.check_room(end + batch.end)
        first = end + batch.first
        held[before + first : before + first + batch.rows] = inputs
        if batch.parents is None:
            return convolve(held[first : before + first + batch.rows], convolution, None)
        return convolve(held, convolution, end + before + batch.lineage(self.shape.taps))

    def recur(
        self, layer: int, rows: DeltaRows, batch: ForwardBatch, end: int | torch.Tensor
    ) -> torch.Tensor:
        """Cache.recur. end: as for `convolve`, which is called first"""
        first = end if isinstance(end, torch.Tensor) else end + batch.first
        return delta_rule(rows, self.state[layer], self.left(layer), first, batch.visible)

    def left(self, layer: int) -> LeftRows:
        """Return what rows of a layer left behind, with room for more."""
        return LeftRows(*(each[layer] for each in self.rows))

    def move(self, end: int, rows: Sequence[int]) -> None:
        """RecentStore.move."""
        count = len(rows)
        if list(rows) == list(range(count)):
            return
        places = end + put(list(rows), self.state.device)
        for each in self.rows:
            each[:, :, end : end + count] = each[:, :, places]
        first = end + self.shape.before
        self.inputs[:, first : first + count] = self.inputs[:, places + self.shape.before]

    def fill_inputs(self, layer: int, inputs: torch.Tensor) -> None:
        """Replace a layer's inputs by the last ones of a text, [tokens, channels], during a fill.
        There are taps - 1 before the first row.
        """
        self.inputs[layer, : len(inputs)] = inputs

    def mark_at(self, length: int) -> Mark:
        """RecentStore.mark_at. The parts are the state, keys, updates, decays and inputs. The
        device makes a copy of one layer at a time.
        """
        parts: list[torch.Tensor] = []
        for own in self._parts(length - self.start):
            parts.append(torch.empty(own.shape, dtype=own.dtype))
            for to, layer in zip(parts[-1], own, strict=True):
                to.copy_(layer)
        return Mark(length, self.start, tuple(parts))

    def take(self, mark: Mark) -> None:
        """RecentStore.take."""
        held = mark.length - mark.start
        for own, part in zip(self._parts(held), mark.parts, strict=True):
            for to, layer in zip(own, part, strict=True):
                to.copy_(layer.to(to.device))
        self.commit_fill(mark.length, held)

    def _parts(self, held: int) -> tuple[torch.Tensor, ...]:
        """Return what a mark with `held` rows has, as views."""
        rows = (each[:, :, :held] for each in self.rows)
        return (self.state, *rows, self.inputs[:, : self.shape.before + held])

    def close(self) -> None:
        """RecentStore.close."""
        self._memory.free(self._allocation)
        self.marks.replace([])
        del self.state, self.rows, self.inputs

    def _empty(self) -> None:
        self.state.zero_()
        self.inputs[:, : self.shape.before].zero_()
        super()._empty()

    def _surplus(self) -> int:
        return max(0, folded_tokens(self.length) - self.start)

    def _drop(self, layer: int, rows: int) -> None:
        left, inputs = self.left(layer), self.inputs[layer]
        last = self.end - rows
        kept = self.shape.before + last
        # Cloned, because the two ranges may overlap, and before anything changes.
        later = [each[:, rows : self.end].clone() for each in left]
        later_inputs = inputs[rows : rows + kept].clone()
        if self.shape.value_heads:
            parts = [left.part(first, first + FOLD_TOKENS) for first in range(0, rows, FOLD_TOKENS)]
            fold(self.state[layer], parts)
        for each, some in zip(left, later, strict=True):
            each[:, :last] = some
        inputs[:kept] = later_inputs
