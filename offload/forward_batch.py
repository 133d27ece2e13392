"""The forward batch: what one forward is over. And the cache that it goes through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """The rows of one forward: tokens, where each stands, and what it follows.

    tokens: [rows] int64
    positions: [rows] int64 on the device that computes
    parents: for each row the row it follows, -1 for what was kept before; rows come after those
        they follow. None where each follows the one before it, as in a text
    sequences: rows of each sequence, side by side; empty for one sequence
    first: in a part of a forward batch, the row of the whole that it begins with
    rotation: cosines and sines of the positions, [rows, head_dim] each, which the model adds
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    parents: tuple[int, ...] | None = None
    sequences: tuple[int, ...] = ()
    first: int = 0
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def text(
        cls, tokens: torch.Tensor, start: int | torch.Tensor, device: torch.device
    ) -> ForwardBatch:
        """Tokens that follow one another, the first at position `start`: a number, or [1] int64 on
        the device.
        """
        return cls(tokens, torch.arange(tokens.shape[0], device=device) + start)

    @classmethod
    def tree(
        cls, tokens: torch.Tensor, start: int, parents: Sequence[int], device: torch.device
    ) -> ForwardBatch:
        """A tree of tokens whose roots stand at position `start`. Raises ValueError if a row comes
        before the one it follows.
        """
        depths: list[int] = []
        for row, parent in enumerate(parents):
            if not -1 <= parent < row:
                raise ValueError(f"row {row} of a tree cannot follow row {parent}")
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return cls(tokens, torch.tensor(depths, device=device) + start, tuple(parents))

    @classmethod
    def side_by_side(cls, batches: Sequence[ForwardBatch]) -> ForwardBatch:
        """Forward batches of several sequences as one."""
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
        )

    @property
    def rows(self) -> int:
        return self.positions.shape[0]

    @property
    def end(self) -> int:
        """The row of the whole forward batch behind the last of this part."""
        return self.first + self.rows

    @cached_property
    def visible(self) -> torch.Tensor | None:
        """Which rows of a tree each row sees, itself included: [rows, rows] bool on the device.
        None for a text, whose rows see all before them.
        """
        if self.parents is None:
            return None
        seen = torch.eye(self.rows, dtype=torch.bool)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                seen[row] |= seen[parent]
        return seen.to(self.positions.device)

    def parts(self, rows: int | None) -> Iterator[ForwardBatch]:
        """The forward batch in parts of so many rows, None for one. Raises ValueError for a tree,
        or for several sequences, that would have to be cut.
        """
        if rows is None or rows >= self.rows:
            yield self
            return
        if self.parents is not None or len(self.sequences) > 1:
            raise ValueError(f"a feed of {self.rows} rows that is no single text cannot be cut")
        for first in range(0, self.rows, rows):
            yield self.slice(first, min(first + rows, self.rows))

    @cached_property
    def alone(self) -> tuple[ForwardBatch, ...]:
        """The forward batch of each sequence, as if it were fed alone."""
        if not self.sequences:
            return (self,)
        batches, first = [], 0
        for rows in self.sequences:
            part = self.slice(first, first + rows)
            parents = self.parents and tuple(
                max(-1, parent - first) for parent in self.parents[first : first + rows]
            )
            batches.append(replace(part, first=0, parents=parents, sequences=()))
            first += rows
        return tuple(batches)

    def slice(self, first: int, end: int) -> ForwardBatch:
        """Rows `first` to `end` of a forward batch that is whole."""
        part = slice(first, end)
        rotation = self.rotation and tuple(table[part] for table in self.rotation)
        return replace(
            self,
            tokens=self.tokens[part],
            positions=self.positions[part],
            first=first,
            rotation=rotation,
        )

    def check_path(self, rows: Sequence[int]) -> None:
        """Raises RuntimeError unless each of some rows follows the one before it."""
        before = -1
        for row in rows:
            if not 0 <= row < self.end or self.parent(row) != before:
                raise RuntimeError(f"rows {list(rows)} are no path of a feed of {self.end}")
            before = row

    def parent(self, row: int) -> int:
        """The row that a row follows, -1 for what was kept before."""
        return row - 1 if self.parents is None else self.parents[row]


class Cache(Protocol):
    """Where a forward keeps its keys and values, and what it attends to."""

    def attend(self, layer: int, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Rotates queries and keys, stores keys and values behind what was kept, and attends.

        qkv: [rows, heads + 2 kv_heads, head_dim]: queries, keys, values of the forward batch's rows
        forward batch: with its rotation. Parts of one forward batch come in order, layer by layer

        Returns [heads, rows, head_dim]: attention of each row to everything that was kept, to the
        rows it follows and to itself. Raises RuntimeError, before any write, if there is no room.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps a path of the last forward batch, row after row, and forgets its other rows.

        Raises RuntimeError, before any change, for rows that are no path of it.
        """
