"""Pieces of a checkpoint that make up the tensors of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from triforce_core.model.sharing.divided import Window
from triforce_kernels.weights.block_types import NARROW, BlockType
from triforce_offload.checkpoint.source import WHOLE, Corner, TensorSource

if TYPE_CHECKING:
    import torch

# Turns the numbers of a small tensor, in float32, into those of the model.
Change = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint that makes up some rows of a tensor of the model.

    rows: number of rows
    order: which stored row of a head each row is (see `head_order`); None for rows as stored
    corner: first row and column of the part that is read; it is as wide as the model's tensor
    change: turns the stored numbers into the model's; None if they are the same
    columns: number of stored columns that `change` takes; None for as many as the model's
    ranges: stored rows, from the corner on, where they do not follow one another; None if they do
    column_ranges: likewise, stored columns
    transposed: whether the stored matrix is transposed: it has a column for each of `rows`
    whole: shape of the stored tensor, if other tensors of the model are parts of it too
    """

    name: str
    rows: int
    order: tuple[int, ...] | None = None
    corner: Corner = WHOLE
    change: Change | None = None
    columns: int | None = None
    ranges: tuple[range, ...] | None = None
    column_ranges: tuple[range, ...] | None = None
    transposed: bool = False
    whole: tuple[int, int] | None = None

    @classmethod
    def apart(
        cls, name: str, ranges: Sequence[range], whole: tuple[int, int] | None = None
    ) -> Piece:
        """Return a piece of stored rows that do not follow one another."""
        return cls(name, sum(map(len, ranges)), ranges=tuple(ranges), whole=whole)

    def following(self) -> Iterator[Piece]:
        """Yield the pieces of stored rows that follow one another."""
        if self.ranges is None:
            yield self
            return
        for rows in self.ranges:
            corner = Corner(self.corner.row + rows.start, self.corner.column)
            yield replace(self, rows=len(rows), corner=corner, ranges=None)

    def within(self, window: Window) -> Piece:
        """Return the part of the piece in a window, which covers whole heads."""
        rows = window.height(self.rows)
        first = 0 if window.rows is None else window.matrices * window.rows.start
        columns, (row, column) = window.columns, self.corner
        part = replace(self, rows=rows)
        if window.matrices > 1:
            part = replace(part, order=alternating(rows // window.matrices, window.matrices))
        if columns is not None and self.change:
            assert isinstance(columns, range)
            assert self.columns is not None, "all stored columns are read"
            part = replace(part, change=_cut_after(self.change, columns))
        elif isinstance(columns, tuple):
            part = replace(part, column_ranges=columns)
        elif columns is not None:
            column += columns.start
        if self.ranges is not None:
            ranges = _cut(self.ranges, first, rows)
            return replace(part, corner=Corner(row, column), ranges=ranges)
        return replace(part, corner=Corner(row + first, column))


def windowed(pieces: Sequence[Piece], windows: Sequence[Window]) -> list[Piece]:
    """Return the parts of pieces in their windows, without empty ones."""
    parts = (piece.within(window) for piece, window in zip(pieces, windows, strict=True))
    return [part for part in parts if part.rows]


def alternating(rows: int, matrices: int) -> tuple[int, ...]:
    """Return the row indices that de-interleave matrices of `rows` rows each: all rows of the
    first, then of the second, ...
    """
    return tuple(i for first in range(matrices) for i in range(first, rows * matrices, matrices))


def _cut_after(change: Change, columns: range) -> Change:
    """Return `change` followed by a slice of the columns."""
    return lambda numbers: change(numbers)[:, columns.start : columns.stop]


def _cut(ranges: Sequence[range], first: int, rows: int) -> tuple[range, ...]:
    """Return `rows` of the rows in ranges, from the one with index `first` on."""
    found = []
    for each in ranges:
        if part := each[max(first, 0) : max(first + rows, 0)]:
            found.append(part)
        first -= len(each)
    return tuple(found)


def pieces_of(
    names: Sequence[str], sizes: Sequence[int], orders: Sequence[tuple[int, ...] | None]
) -> list[Piece]:
    """Return pieces of tensors of their own, or of one tensor that has all of them."""
    if len(names) == len(sizes):
        return [Piece(*each) for each in zip(names, sizes, orders, strict=True)]
    firsts = accumulate(sizes, initial=0)
    return [
        Piece(names[0], rows, order, Corner(first, 0))
        for rows, order, first in zip(sizes, orders, firsts, strict=False)
    ]


def block_type(source: TensorSource, piece: Piece) -> BlockType | None:
    """Return the block type that a piece can be kept in, None for none."""
    blocks = None if piece.transposed else source.blocks(piece.name)
    if blocks or piece.change:
        return blocks
    return NARROW.get(source.dtype(piece.name) or "")


def stored_shapes(
    pieces: Sequence[Piece], shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of the checkpoint, and their shapes, that make up one of this shape."""
    # Several pieces may be parts of one tensor.
    rows: dict[str, int] = {}
    for piece in pieces:
        rows[piece.name] = rows.get(piece.name, 0) + piece.rows
    columns = {piece.name: piece.columns for piece in pieces if piece.columns}
    whole = {piece.name: piece.whole for piece in pieces if piece.whole}
    yield from whole.items()
    for stored in whole:
        del rows[stored]
    for stored, count in rows.items():
        width = columns.get(stored)
        yield stored, (count, *shape[1:]) if width is None else (count, width)


def fits(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a stored shape is one of the model's, apart from dimensions of size 1, which
    formats leave out or not, matrices that are stacked in one, one above the other, and vectors in
    parts (norms of groups).
    """
    if len(shape) == 1:
        return prod(stored) == shape[0]

    def filled(shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = tuple(size for size in shape if size != 1)
        return sizes if len(sizes) < 3 else (prod(sizes[:-1]), sizes[-1])

    return filled(stored) == filled(shape)


def head_order(head_dim: int, rotated: int, *, interleaved: bool) -> tuple[int, ...] | None:
    """Return which number of a stored head each number of ours is; None if they are the same.

    Ours are rotated in pairs half a head apart. Of heads that are rotated in part, pairs that stay
    as they are come after those that are rotated, in each half.

    rotated: how many numbers of a head are rotated; in files they come first
    """
    pairs, still = rotated // 2, head_dim // 2 - rotated // 2
    step, second = (2, 1) if interleaved else (1, pairs)
    rest = list(range(rotated, head_dim))
    order = [step * i for i in range(pairs)] + rest[:still]
    order += [step * i + second for i in range(pairs)] + rest[still:]
    return None if order == list(range(head_dim)) else tuple(order)


def less_one(numbers: torch.Tensor) -> torch.Tensor:
    """The weights of a norm whose files have 1 + the weights."""
    return numbers - 1


def even_columns(numbers: torch.Tensor) -> torch.Tensor:
    """Of gates and up projections by turns, the gates."""
    return numbers[:, ::2]


def odd_columns(numbers: torch.Tensor) -> torch.Tensor:
    """Of gates and up projections by turns, the up projections."""
    return numbers[:, 1::2]


def minus_exp(numbers: torch.Tensor) -> torch.Tensor:
    """The factor of decays of which files have the logarithm of its size."""
    return -numbers.exp()
