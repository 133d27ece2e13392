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


@dataclass(frozen=True)
class PromptPart:
    """What a prefill computes of a prompt, if passes of other sequences run between its parts.

    before, after: number of the prompt's tokens that prefills compute before this one and after it
    """

    before: int = 0
    after: int = 0


# A prefill of all of a prompt.
WHOLE = PromptPart()


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

    def drop(self, length: int) -> None:
        """Drop the mark at this length, if there is one."""
        self._marks = [mark for mark in self._marks if mark.length != length]

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
    """Where the prefill of a prompt leaves marks: at ends of chunks, at about equal distances."""

    def __init__(self, marks: Marks, length: int, rows: int, part: PromptPart) -> None:
        """marks: the marks that the sequence has
        length: number of tokens of its text
        rows: number of rows of the prefill, which computes a `part` of the prompt
        """
        known = sum(mark.length <= length - part.before for mark in marks)
        # Besides these, one where the prefill began and, if there are parts, where this one did.
        room = MOST_MARKS - 1 - known - (part != WHOLE)
        self._before, self._total = part.before, part.before + rows + part.after
        self._every = max(MARK_TOKENS, -(-self._total // (room + 1))) if room > 0 else self._total

    def due(self, first: int, end: int) -> bool:
        """Whether a mark belongs at the end of a chunk from row `first` to row `end`."""
        first, end = self._before + first, self._before + end
        return end < self._total and first // self._every != end // self._every
