"""Marks: copies of the windows at some lengths of a text, to which it can be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from triforce_offload.kv.windows.shape import MOST_MARKS


@dataclass(frozen=True, eq=False)
class Mark:
    """The KV of the last tokens of a text, at one of its lengths.

    length: number of tokens of the text
    rows: [layers, 2, kv_heads, tokens, head_dim] on the host
    """

    length: int
    rows: torch.Tensor

    @property
    def start(self) -> int:
        """Number of tokens of the text before the rows."""
        return self.length - self.rows.shape[3]

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
