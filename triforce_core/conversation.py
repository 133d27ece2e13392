"""Conversations as tokens: what a model said stays the tokens that it drew."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from triforce_core.model.checkpoints.tokenizer import Tokenizer
from triforce_core.requests.stream import Completion

Messages = Sequence[Mapping[str, str]]
# So many conversations are told apart by their text.
_KNOWN = 64


class Turn(NamedTuple):
    """A conversation up to where the model answers, as text in its template and as tokens."""

    text: str
    tokens: list[int]


class Conversations:
    """The tokens of conversations that were had, by their text.

    Encoding what a model said need not give the tokens that it drew, and their KV is what is kept.
    So the longest text that a conversation begins with keeps its tokens, and the rest is encoded.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: deque[Turn] = deque(maxlen=_KNOWN)

    def turn(self, messages: str | Messages, variables: Mapping[str, Any] | None = None) -> Turn:
        """Messages, ready for the model's answer. variables: see `Tokenizer.render`

        Raises UsageError.
        """
        text = self._tokenizer.render(messages, variables)
        begun = [known for known in tuple(self._known) if text.startswith(known.text)]
        known = max(begun, key=lambda each: len(each.text), default=Turn("", []))
        rest = text[len(known.text) :]
        return Turn(text, known.tokens + (self._tokenizer.encode_rendered(rest) if rest else []))

    def answered(self, turn: Turn, completion: Completion, stops: frozenset[int]) -> Turn | None:
        """Takes note of an answer. Returns the turn with it, from which it may go on; None where a
        text ended it.

        stops: tokens that end a text and are no part of it
        """
        drawn = completion.token_ids
        if drawn and drawn[-1] in stops:
            drawn = drawn[:-1]
        elif completion.finish_reason == "stop":
            # That is in its tokens, and not in what was given.
            return None
        after = Turn(turn.text + completion.text, turn.tokens + drawn)
        # Tokens without a text would go into every conversation that reads the same.
        if all(self._tokenizer.decode([token]) for token in drawn):
            self.know(after)
        return after

    def know(self, turn: Turn) -> None:
        """Takes note of a text and its tokens."""
        self._known.append(turn)

    def knows(self, turn: Turn) -> bool:
        """Whether conversations that begin with the text have its tokens."""
        return turn in self._known
