"""The forward batch, which one forward runs over, and the cache that the forward uses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, Protocol, TypeVar

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax
from triforce_kernels.attention.dense import DenseKeys
from triforce_kernels.attention.selection import Selection
from triforce_kernels.recurrent.conv import Convolution
from triforce_kernels.recurrent.delta import DeltaRows

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Carried:
    """What the layers of one forward have beside hidden states.

    embedded: embeddings of the tokens, [rows, hidden] on the device
    per_layer: returns the per-layer embeddings of a layer for some rows, from the first to the one
        after the last, [rows, width] on any device
    shared_kv: keys and values that later layers use too, not rotated, [rows, 2 kv_heads, head_dim];
        by whether the layers have a window, and by the first of the rows
    """

    embedded: torch.Tensor | None = None
    per_layer: Callable[[int, int, int], torch.Tensor] | None = None
    shared_kv: dict[tuple[bool, int], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """The rows of one forward: tokens, their positions, and which row each one follows.

    tokens: [rows] int64
    positions: [rows] int64 on the device that computes
    parents: for each row the row it follows, or -1 if it follows the context; a row comes after the
        row it follows. None if each row follows the one before it
    sequences: number of rows of each sequence, side by side; empty for one sequence
    first: in a slice of a forward batch, the index of its first row in the whole batch
    rotation: cosines and sines of the positions, [rows, head_dim] each, which the model adds
    query_scale: factors of the queries, [rows], or None; the model adds them too
    drafted: if the rows continue a tree of which earlier forwards ran the first rows: which of the
        last keys each row attends to, [rows, drafted] bool on the device, its own included;
        `parents` is None
    lines: what `lineage` returns, if the host does not know `parents`
    before: the last tokens before the rows of each sequence, as many as a model asks for, or fewer
        at the beginning of a text
    index_rotation: returns cosines and sines of positions for an index of keys, which the model
        adds
    carried: what the model adds too, if its layers have more than hidden states
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    parents: tuple[int, ...] | None = None
    sequences: tuple[int, ...] = ()
    first: int = 0
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    query_scale: torch.Tensor | None = None
    drafted: torch.Tensor | None = None
    lines: torch.Tensor | None = None
    before: tuple[tuple[int, ...], ...] = ()
    index_rotation: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    carried: Carried | None = None

    @classmethod
    def text(
        cls, tokens: torch.Tensor, start: int | torch.Tensor, device: torch.device
    ) -> ForwardBatch:
        """Return a batch of consecutive tokens.

        start: position of the first token, a number or [1] int64 on the device
        """
        return cls(tokens, torch.arange(tokens.shape[0], device=device) + start)

    def after(self, tokens: Sequence[int], end: int, count: int) -> ForwardBatch:
        """Return the batch of one sequence with the last `count` of the first `end` tokens of its
        text, which are before it.
        """
        before = tuple(tokens[max(0, end - count) : end])
        return replace(self, before=(before,)) if count else self

    @classmethod
    def tree(
        cls, tokens: torch.Tensor, start: int, parents: Sequence[int], device: torch.device
    ) -> ForwardBatch:
        """Return a batch for a tree of tokens whose roots are at position `start`. Raises
        ValueError if a row comes before the one it follows.
        """
        depths: list[int] = []
        for row, parent in enumerate(parents):
            if not -1 <= parent < row:
                raise ValueError(f"row {row} of a tree cannot follow row {parent}")
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return cls(tokens, torch.tensor(depths, device=device) + start, tuple(parents))

    @classmethod
    def side_by_side(cls, batches: Sequence[ForwardBatch]) -> ForwardBatch:
        """Concatenate the forward batches of several sequences."""
        if len(batches) == 1:
            return batches[0]
        parents, first = [], 0
        for batch in batches:
            parents += [first + p if p >= 0 else -1 for p in map(batch.parent, range(batch.rows))]
            first += batch.rows
        return cls(
            torch.cat([batch.tokens for batch in batches]),
            torch.cat([batch.positions for batch in batches]),
            None if all(batch.parents is None for batch in batches) else tuple(parents),
            tuple(batch.rows for batch in batches),
            before=tuple(chain.from_iterable(batch.before for batch in batches)),
        )

    @property
    def rows(self) -> int:
        return self.positions.shape[0]

    @property
    def end(self) -> int:
        """Index in the whole forward batch of the row after the last row of this part."""
        return self.first + self.rows

    @cached_property
    def visible(self) -> torch.Tensor | None:
        """Which rows of a tree each row attends to, itself included, bool on the device: [rows,
        rows], or `drafted` of a tree that is continued. None for consecutive tokens, where each row
        attends to all rows before it.
        """
        if self.parents is None:
            return self.drafted
        return visible_rows(self.parents).to(self.positions.device)

    def once(self, key: Hashable, made: Callable[[], T]) -> T:
        """Return what `made` returned for a key, which all layers of a forward share."""
        if key not in self._made:
            self._made[key] = made()
        return self._made[key]

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def lineage(self, count: int) -> torch.Tensor:
        """Return the `count` rows that end with each row, each following the one before it:
        [rows, count] int64 on the device. -1 stands for the last token before the batch, -2 for
        the one before that.
        """
        if self.lines is not None:
            return self.lines
        device = self.positions.device
        if self.parents is None:
            rows = torch.arange(self.first, self.end, device=device)
            return rows.unsqueeze(1) + torch.arange(1 - count, 1, device=device)
        return lines_of(self.parents, count).to(device)

    @property
    def deepest(self) -> int:
        """Number of rows of the longest path."""
        if self.parents is None:
            return self.end
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return max(depths)

    def parts(self, rows: int | None) -> Iterator[ForwardBatch]:
        """Yield the forward batch in parts of `rows` rows; None yields it whole. Raises ValueError
        if a tree, or a batch of several sequences, would have to be cut.
        """
        if rows is None or rows >= self.rows:
            yield self
            return
        if self.visible is not None or len(self.sequences) > 1:
            raise ValueError(
                f"a forward batch of {self.rows} rows cannot be cut if it is a tree or has several "
                "sequences"
            )
        for first in range(0, self.rows, rows):
            yield self.slice(first, min(first + rows, self.rows))

    @cached_property
    def alone(self) -> tuple[ForwardBatch, ...]:
        """The forward batch of each sequence on its own."""
        if not self.sequences:
            return (self,)
        batches, first = [], 0
        for rows, before in zip_longest(self.sequences, self.before, fillvalue=()):
            part = replace(self.slice(first, first + rows), before=(before,))
            parents = self.parents and tuple(
                max(-1, parent - first) for parent in self.parents[first : first + rows]
            )
            batches.append(replace(part, first=0, parents=parents, sequences=()))
            first += rows
        return tuple(batches)

    def slice(self, first: int, end: int) -> ForwardBatch:
        """Return rows `first` to `end` of a whole forward batch."""
        part = slice(first, end)
        rotation = self.rotation and tuple(table[part] for table in self.rotation)
        return replace(
            self,
            tokens=self.tokens[part],
            positions=self.positions[part],
            first=first,
            rotation=rotation,
            query_scale=None if self.query_scale is None else self.query_scale[part],
        )

    def check_path(self, rows: Sequence[int]) -> None:
        """Raise RuntimeError unless each row of `rows` follows the one before it."""
        before = -1
        for row in rows:
            if not 0 <= row < self.end or self.parent(row) != before:
                raise RuntimeError(
                    f"rows {list(rows)} are no path of a forward batch of {self.end}"
                )
            before = row

    def parent(self, row: int) -> int:
        """Return the row that `row` follows, or -1 if it follows the context."""
        return row - 1 if self.parents is None else self.parents[row]


def visible_rows(parents: Sequence[int]) -> torch.Tensor:
    """Return which rows of a tree each row follows, itself included, [rows, rows] bool on the host.

    parents: as in ForwardBatch
    """
    seen = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen


def lines_of(parents: Sequence[int], count: int) -> torch.Tensor:
    """Return what `ForwardBatch.lineage` does of a tree, [rows, count] int64 on the host."""
    seen = [[row] for row in range(len(parents))]
    for line in seen:
        while len(line) < count:
            line.append(parents[line[-1]] if line[-1] >= 0 else line[-1] - 1)
    return torch.tensor([line[::-1] for line in seen])


class Cache(Protocol):
    """Stores the keys and values of a forward and computes its attention."""

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Rotate queries and keys, append keys and values to the context, and attend.

        qkv: [rows, heads + 2 kv_heads, head_dim]: queries, keys and values of the batch's rows;
            without values if the keys are the values too
        batch: the forward batch, with its rotation. Parts of one forward batch come in order, layer
            by layer
        softmax: what the softmax has beyond a plain one

        Returns [heads, rows, head_dim]: each row attends to the whole context, to the rows it
        follows and to itself. Raises RuntimeError, before any write, if there is no room.
        """

    def attend_window(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Attend as `attend` does in a layer with a window, to the last tokens only.

        layer: index among the layers with a window
        """

    def dense(
        self, layer: int, batch: ForwardBatch, *, has_window: bool = False
    ) -> DenseKeys | None:
        """Return the keys of a layer, if all are on the device, for a caller that writes those of
        the batch's rows and attends by itself, as `attend` would, or that then calls `attend`. None
        if only the cache can.

        has_window: whether the layer is one of those with a window, as in `attend_window`

        Raises RuntimeError if there is no room.
        """

    def attend_selected(
        self,
        layer: int,
        qkv: torch.Tensor,
        index: torch.Tensor,
        batch: ForwardBatch,
        selection: Selection,
    ) -> torch.Tensor:
        """Attend as `attend` does, each row to the keys that it chooses by an index, and keep the
        rows' vectors in it. All KV must be on the device, in no blocks.

        index: [rows, heads of the index + 1, dim]: a row's queries, rotated, and last its vector
        selection: how rows choose
        """

    def convolve(
        self,
        layer: int,
        inputs: torch.Tensor,
        convolution: Convolution,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Convolve each channel of the last tokens in a recurrent layer, and keep the inputs.

        layer: index among the recurrent layers; the convolution behind n-gram embeddings has the
            number after these
        inputs: [rows, channels]

        Returns [rows, channels]: each row sees the rows it follows and the context.
        """

    def recur(self, layer: int, rows: DeltaRows, batch: ForwardBatch) -> torch.Tensor:
        """Apply a layer's recurrence to its state, after `convolve`. Returns [rows, value_heads,
        value_dim] in the dtype of the values.

        layer: index among the recurrent layers
        """
