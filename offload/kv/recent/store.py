"""What windows and states have in common: rows of the last tokens, and marks to go back to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from triforce_offload.kv.recent.marks import Mark, Marks, reaches
from triforce_offload.kv.recent.shapes import RecentShape


class RecentStore(ABC):
    """A part of a sequence that is always on the device and holds rows of its last tokens only.

    The pass and the retrieval level read the same rows. Rows of a forward are written behind the
    tokens that are held, by whichever of the two runs; `keep` makes some of them tokens of the
    text. The oldest rows leave now and then, many at a time.

    A text can be cut to a length that the store reaches, or one of its marks. Marks are copied to
    host memory when what they need is about to leave.

    shape: the geometry of the store
    start: number of tokens of the text before the first row
    length: number of tokens of the text
    """

    shape: RecentShape

    def __init__(self, capacity: int, past: int) -> None:
        """capacity: number of rows that there is room for
        past: number of tokens before a cut whose rows must be held
        """
        self.start = self.length = 0
        self.marks = Marks()
        self._capacity = capacity
        self._past = past
        self._whole = True
        self._wanted: list[int] = []
        # Length at which there is a mark only as long as a part of a prompt is prefilled.
        self._until_filled: int | None = None
        # The mark at the current length, if it was asked for since the store changed.
        self._current: Mark | None = None
        # Rows that are leaving, and the first layer that still has them.
        self._leaving = self._next_layer = 0

    @property
    def end(self) -> int:
        """Index of the row after the last token."""
        return self.length - self.start

    def has_room(self, rows: int) -> bool:
        """Whether a forward may write `rows` rows behind the last token."""
        return self.end + rows <= self._capacity

    def check_room(self, end: int) -> None:
        """Raise RuntimeError if there is no room for `end` rows."""
        if end > self._capacity:
            raise RuntimeError(f"{end} rows of {self._capacity} that there is room for")

    @abstractmethod
    def move(self, end: int, rows: Sequence[int]) -> None:
        """Move `rows`, counted from index `end`, in this order to `end` and the places after it."""

    @abstractmethod
    def mark_at(self, length: int) -> Mark:
        """Return a copy of what is held at a length that the rows reach, on the host."""

    @abstractmethod
    def take(self, mark: Mark) -> None:
        """Replace what is held by what a mark holds."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""

    @abstractmethod
    def _surplus(self) -> int:
        """Return how many of the oldest rows should leave."""

    @abstractmethod
    def _drop(self, layer: int, rows: int) -> None:
        """Drop a layer's oldest rows, which `start` still counts. Whatever fails for lack of memory
        fails before anything of the layer changes.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Make these rows of the last forward, in this order, tokens of the text."""
        self._current = None
        self.move(self.end, rows)
        self.length += len(rows)
        if leaving := self._surplus():
            for length in self._wanted:
                if reaches(self.start + leaving, self.length, length, self._past) != length:
                    self.marks.add(self.mark_at(length))
            self._leaving = leaving
            self._finish_leaving()

    def _finish_leaving(self) -> None:
        """Drop rows that are leaving from the layers that still have them."""
        while self._leaving and self._next_layer < self.shape.layers:
            self._drop(self._next_layer, self._leaving)
            self._next_layer += 1
        self.start += self._leaving
        self._leaving = self._next_layer = 0
        self._prune_wanted()

    def want(self, length: int) -> None:
        """Ask for a mark at this length, the current one or a longer one, before its rows leave the
        device.
        """
        if length not in self._wanted:
            self._wanted.append(length)

    def begin_fill(self, *, goes_on: bool = False) -> None:
        """Prepare for a prefill: leave a mark at the current length, because rows are replaced.

        goes_on: whether the prefill of a prompt goes on there, so that the mark is dropped when
            this part of it ends
        """
        if self.length and not self.marks.has(self.length):
            self.marks.add(self.mark())
            self._until_filled = self.length if goes_on else None
        self._whole = False

    def commit_fill(self, length: int, held: int) -> None:
        """End a prefill with `held` rows of a text of `length` tokens."""
        if self._until_filled is not None:
            self.marks.drop(self._until_filled)
        self._current = self._until_filled = None
        self.length, self.start, self._whole = length, length - held, True
        self._leaving = self._next_layer = 0
        self._prune_wanted()

    def mark(self) -> Mark:
        """Return a copy of what is held at the current length, on the host."""
        if self._current is None:
            self._current = self.mark_at(self.length)
        return self._current

    def reachable(self, tokens: int) -> int:
        """Return the greatest length up to `tokens` to which the text can be cut."""
        best = self.marks.best(tokens, self._past)
        return max(self._reaches(tokens), best[0] if best else 0)

    def roll_back(self, tokens: int) -> None:
        """Cut the text to its first `tokens` tokens. Raises RuntimeError if that is no length that
        `reachable` returns.
        """
        self._current = None
        if not tokens:
            self._empty()
        else:
            # After a lack of memory, some layers may still have rows that were leaving.
            self._finish_leaving()
        if tokens and self._reaches(tokens) != tokens:
            best = self.marks.best(tokens, self._past)
            if best is None or best[0] != tokens:
                raise RuntimeError(f"a text of {self.length} tokens cannot be cut to {tokens}")
            self.take(best[1])
        self.length = tokens
        self.marks.cut(tokens)
        self._wanted = [length for length in self._wanted if length <= tokens]

    @property
    def saved_lengths(self) -> list[int]:
        """Lengths of all marks, and last the current one."""
        return [*(mark.length for mark in self.marks if mark.length != self.length), self.length]

    def saved(self, index: int) -> Mark:
        """Return what is held at one of `saved_lengths`."""
        length = self.saved_lengths[index]
        if length == self.length:
            return self.mark()
        return next(mark for mark in self.marks if mark.length == length)

    def restore(self, marks: Sequence[Mark]) -> None:
        """Take what was `saved`, the last of which is at the text's length."""
        self._current = None
        self.take(marks[-1])
        self.marks.replace(marks[:-1])

    def _empty(self) -> None:
        """Hold nothing."""
        self.commit_fill(0, 0)

    def _reaches(self, tokens: int) -> int:
        """Return the greatest length up to `tokens` that the rows themselves reach, or 0."""
        if not self._whole:
            return 0
        return reaches(self.start, self.length, tokens, self._past) or 0

    def _prune_wanted(self) -> None:
        """Forget the wanted lengths whose rows are not held any more."""
        self._wanted = [length for length in self._wanted if self._reaches(length) == length]
