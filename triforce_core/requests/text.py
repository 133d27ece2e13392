"""Tokens to text, as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from triforce_core.model.checkpoints.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns tokens into text as they come, holding back bytes that are not yet a character, and
    what may be the beginning of a text that ends it.

    The pieces, `finish` included, add up to `decode` of all the tokens, provided that a longer text
    decodes to an extension of a shorter one up to its last word; only the last words are decoded
    again at each step. A stop cuts them there.

    text: all that was given so far; stopped: whether a stop came
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str] = (), *, one_by_one: bool = False
    ) -> None:
        """stops: texts of which the first one ends the text; they are no part of it. one_by_one:
        whether each token is to have a piece of its own, as far as it completes one.
        """
        self._tokenizer = tokenizer
        self._one_by_one = one_by_one or bool(stops)
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        # Tokens from here on are decoded together.
        self._context = 0
        # Tokens before here are out.
        self._shown = 0
        # What may be the beginning of a stop.
        self._held = ""
        self.text = ""
        self.stopped = False

    def portions(self, tokens: list[int]) -> Iterator[list[int]]:
        """Tokens in as many parts as `push` wants, so that it is known which one stops the text, or
        which gives which piece.
        """
        if not self._one_by_one:
            yield tokens
            return
        for token in tokens:
            yield [token]

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
        piece = ""
        if self._tokenizer is not None and self._shown < len(self._tokens):
            before = self._tokenizer.decode(self._tokens[self._context : self._shown])
            piece = self._tokenizer.decode(self._tokens[self._context :])[len(before) :]
            self._shown = len(self._tokens)
        piece = self._emit(piece)
        rest, self._held = self._held, ""
        self.text += rest
        return piece + rest

    def _emit(self, piece: str) -> str:
        if self._stops:
            piece = self._until_stop(piece)
        self.text += piece
        return piece

    def _until_stop(self, piece: str) -> str:
        if self.stopped:
            return ""
        whole = self._held + piece
        found = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return whole[: min(found)]
        held = max(_begun(whole, stop) for stop in self._stops)
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held]


def _begun(text: str, stop: str) -> int:
    """Characters of a stop that a text ends with, less than all of them."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
