"""Marks: copies of windows or of states at some lengths of a text, to which it can be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from triforce_offload.weights.formats import ElementType

if TYPE_CHECKING:
    import torch

# Marks of a sequence, at most.
MOST_MARKS = 6
# A prefill leaves a mark after this many tokens, or fewer marks if there would be too many.
MARK_TOKENS = 4096


@dataclass(frozen=True, eq=False)
class Mark:
    """What a store holds at one of a text's lengths.

    length: number of tokens of the text
    start: number of tokens before those whose rows are held
    parts: tensors on the host, as the store's shape says (`mark_parts`)
    """

    length: int
    start: int
    parts: tuple[torch.Tensor, ...]

    def reaches(self, tokens: int, past: int) -> int | None:
        """Return the greatest length up to `tokens` to which the text can be cut with this mark, or
        None. past: number of tokens that must be held before that length
        """
        return reaches(self.start, self.length, tokens, past)


def reaches(start: int, length: int, tokens: int, past: int) -> int | None:
    """Return the greatest length up to `tokens` to which a text can be cut whose tokens from
    `start` to `length` are held, or None.

    past: number of tokens before the cut that must be held, or all that there are
    """
    cut = min(length, tokens)
    return cut if start <= max(0, cut - past) else None


class MarkTensor(NamedTuple):
    """A tensor of a mark, with heads in the second dimension.

    by_keys: whether its heads are key heads; else they are value heads
    """

    shape: tuple[int, ...]
    dtype: ElementType
    by_keys: bool = True


class Marks:
    """The marks of a sequence, the shortest first. The last one is the newest."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._marks)

    def __len__(self) -> int:
        return len(self._marks)

    def has(self, length: int) -> bool:
        """Whether there is a mark at this length."""
        return any(mark.length == length for mark in self._marks)

    def add(self, mark: Mark) -> None:
        """Add a mark, unless there is one at its length. If there are too many, drop the one whose
        neighbours are closest together; the longest stays.
        """
        if self.has(mark.length):
            return
        self._marks = sorted((*self._marks, mark), key=lambda each: each.length)
        if len(self._marks) > MOST_MARKS:
            lengths = [0, *(mark.length for mark in self._marks)]
            gaps = [lengths[i + 2] - lengths[i] for i in range(len(self._marks) - 1)]
            del self._marks[gaps.index(min(gaps))]

    def cut(self, tokens: int) -> None:
        """Drop marks of more than `tokens` tokens: the text behind that changes."""
        self._marks = [mark for mark in self._marks if mark.length <= tokens]

    def best(self, tokens: int, past: int) -> tuple[int, Mark] | None:
        """Return the greatest length up to `tokens` that a mark reaches, and the mark."""
        found = [(reached, mark) for mark in self._marks if (reached := mark.reaches(tokens, past))]
        return max(found, key=lambda each: each[0], default=None)

    def replace(self, marks: Sequence[Mark]) -> None:
        """Replace all marks."""
        self._marks = list(marks)


class MarkPlaces:
    """Where a prefill leaves marks: at the ends of parts, at about equal distances."""

    def __init__(self, marks: int, rows: int) -> None:
        """marks: number of marks that the sequence has. rows: number of rows of the prefill"""
        room = MOST_MARKS - 1 - marks
        self._every = max(MARK_TOKENS, -(-rows // (room + 1))) if room > 0 else rows

    def due(self, first: int, end: int) -> bool:
        """Whether a mark belongs at the end of a part from row `first` to row `end`."""
        return first // self._every != end // self._every
