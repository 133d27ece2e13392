"""The parts of an answer: what the model reasoned, what it answered, and the tools it called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

# The tools of a request: the JSON schema of the parameters of each, by name.
Tools = Mapping[str, Mapping[str, Any]]
# Characters in each piece of a complete text. Splitters copy the rest of a piece at each tag.
_PIECE = 4096


class ToolCall(NamedTuple):
    """A call of a tool. arguments: a JSON object as text"""

    name: str
    arguments: str


class Parts(NamedTuple):
    """Parts of a text."""

    reasoning: str = ""
    answer: str = ""
    calls: tuple[ToolCall, ...] = ()


class Split(Protocol):
    """A splitter of a text that arrives in pieces."""

    def take(self, text: str) -> Parts:
        """Return what a piece of the text completes."""

    def finish(self) -> Parts:
        """Return the text that was held back."""


def joined(some: Parts, rest: Parts) -> Parts:
    """Return the parts of two texts that follow each other."""
    return Parts(
        some.reasoning + rest.reasoning, some.answer + rest.answer, some.calls + rest.calls
    )


def all_of(found: Iterable[Parts]) -> Parts:
    """Return the parts of texts that follow each other."""
    each = tuple(found)
    return Parts(
        "".join(parts.reasoning for parts in each),
        "".join(parts.answer for parts in each),
        tuple(call for parts in each for call in parts.calls),
    )


def whole(split: Split, text: str) -> Parts:
    """Return the parts of a complete text."""
    pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
    return all_of([*map(split.take, pieces), split.finish()])


def begun(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may begin a tag."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if tag.startswith(text[len(text) - n :])), 0)


class HeldText:
    """Text that is held back until a tag ends it. All pieces together take linear time."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        # The end of the text, which may begin the tag.
        self._end = ""

    def take(self, text: str, tag: str) -> tuple[str, str] | None:
        """Add a piece. Return the text before the tag and the text after it, None if there is no
        tag yet.
        """
        before, found, after = (self._end + text).partition(tag)
        ready = len(before) - (0 if found else begun(before, tag))
        self._pieces.append(before[:ready])
        self._end = before[ready:]
        return (self.rest(), after) if found else None

    def rest(self) -> str:
        """Return the text, and hold nothing."""
        text = "".join(self._pieces) + self._end
        self._pieces, self._end = [], ""
        return text
