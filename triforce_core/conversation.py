"""Conversations as tokens: a model's answers keep the tokens that were drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from triforce_core.model.tokenizing.tokenizer import Messages, Tokenizer
from triforce_core.requests.stream import Completion

# Number of conversations that are remembered.
_KNOWN = 64


class Turn(NamedTuple):
    """A conversation up to the model's answer, as rendered text and as tokens."""

    text: str
    tokens: list[int]


class Conversations:
    """Tokens of earlier conversations by their text.

    Encoding a model's answer may yield other tokens than those it drew, and KV is kept for the
    drawn tokens. So the longest known text that a conversation begins with keeps its tokens, and
    only the rest is encoded.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: deque[Turn] = deque(maxlen=_KNOWN)

    def turn(
        self,
        messages: str | Messages,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        begun: str = "",
    ) -> Turn:
        """Render and encode messages, ready for the model's answer.

        variables, tools: see `Tokenizer.render`
        begun: text with which the answer begins
        Raises UsageError.
        """
        text = self._tokenizer.render(messages, variables, tools) + begun
        begun = [known for known in tuple(self._known) if text.startswith(known.text)]
        known = max(begun, key=lambda each: len(each.text), default=Turn("", []))
        rest = text[len(known.text) :]
        return Turn(text, known.tokens + (self._tokenizer.encode_rendered(rest) if rest else []))

    def answered(self, turn: Turn, completion: Completion, stops: frozenset[int]) -> Turn | None:
        """Remember an answer. Return the turn with the answer, from which the conversation can
        continue, or None if a stop text ended the answer.

        stops: end-of-text tokens, which are not part of the text
        """
        drawn = completion.token_ids
        if drawn and drawn[-1] in stops:
            drawn = drawn[:-1]
        elif completion.finish_reason == "stop":
            # The stop text is in the tokens, but not in the completion's text.
            return None
        after = Turn(turn.text + completion.text, turn.tokens + drawn)
        # Tokens without text would enter every other conversation with an equal text.
        if all(self._tokenizer.decode([token]) for token in drawn):
            self.know(after)
        return after

    def know(self, turn: Turn) -> None:
        """Remember a text and its tokens."""
        self._known.append(turn)

    def knows(self, turn: Turn) -> bool:
        """Whether conversations that begin with the turn's text reuse its tokens."""
        return turn in self._known
