"""Tokens to text, as they come."""

from __future__ import annotations

from triforce_core.model.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns tokens into text as they come, holding back bytes that are not yet a character.

    The pieces, `finish` included, add up to `decode` of all the tokens, provided that a longer text
    decodes to an extension of a shorter one up to its last word; only the last words are decoded
    again at each step.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Tokens from here on are decoded together.
        self._context = 0
        # Tokens before here are out.
        self._shown = 0
        self.text = ""

    def push(self, tokens: list[int]) -> str:
        """The text that `tokens` complete."""
        self._tokens += tokens
        if self._tokenizer is None:
            return ""
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        after = self._tokenizer.decode(self._tokens[self._context :])
        if after.endswith(_REPLACEMENT):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return self._emit(after[len(before) :])

    def finish(self) -> str:
        """What was held back."""
        if self._tokenizer is None or self._shown == len(self._tokens):
            return ""
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        after = self._tokenizer.decode(self._tokens[self._context :])
        self._shown = len(self._tokens)
        return self._emit(after[len(before) :])

    def _emit(self, piece: str) -> str:
        self.text += piece
        return piece
