"""Incremental conversion of tokens to text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from triforce_core.model.tokenizing.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """A converter of tokens to text as they arrive. It holds back incomplete characters, and text
    that may be the beginning of a stop text.

    The pieces, with that of `finish`, add up to `decode` of all tokens up to a stop text, if there
    is one. This requires that decoding more tokens only extends the text up to its last word: each
    step decodes only the last words again.

    text: all text that was returned so far
    stop: the stop text that occurred, or None
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str] = (), *, one_by_one: bool = False
    ) -> None:
        """stops: stop texts; the output ends before the first of them
        one_by_one: whether each token gets its own piece, if it completes a character
        """
        self._tokenizer = tokenizer
        self._one_by_one = one_by_one or bool(stops)
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        # Tokens from here on are decoded together.
        self._context = 0
        # Tokens before here have been converted.
        self._shown = 0
        # Text that may be the beginning of a stop text.
        self._held = ""
        self.text = ""
        self.stop: str | None = None

    def portions(self, tokens: list[int]) -> Iterator[list[int]]:
        """Yield tokens in the portions to `push`: one by one if it matters which token ends the
        text or which token a piece comes from.
        """
        if not self._one_by_one:
            yield tokens
            return
        for token in tokens:
            yield [token]

    def push(self, tokens: list[int]) -> str:
        """Return the text that `tokens` complete."""
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
        """Return the text that was held back."""
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
        if self.stop is not None:
            return ""
        whole = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := whole.find(stop)) >= 0]
        if found:
            at, self.stop = min(found)
            self._held = ""
            return whole[:at]
        held = max(_begun(whole, stop) for stop in self._stops)
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held]


def _begun(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which the text ends."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
