"""The parts of an answer: what the model reasoned, what it answered, and the tools it called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

# The tools of a request: the JSON schema of the parameters of each, by name.
Tools = Mapping[str, Mapping[str, Any]]


class ToolCall(NamedTuple):
    """A call of a tool. arguments: a JSON object as text, as the model wrote it"""

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


def whole(split: Split, text: str) -> Parts:
    """Return the parts of a complete text."""
    return joined(split.take(text), split.finish())


def begun(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may begin a tag."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if tag.startswith(text[len(text) - n :])), 0)
