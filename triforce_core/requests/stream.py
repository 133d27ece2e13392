"""Output of a request: text after each pass, then the whole completion."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from triforce_core.decoding.decoder import Step
from triforce_core.requests.text import TextStream
from triforce_offload.errors import UsageError

# Characters of a text that its representation shows.
_SHOWN = 60


class TokenLogprob(NamedTuple):
    """A token, its log-probability, and the likeliest tokens with their log-probabilities."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """The result of a request.

    token_ids: the new tokens only, an end-of-text token included
    text: text of the new tokens
    finish_reason: "stop", "length" or "interrupted"; "error" if the stream raised an error
    stats: see docs/stats.md
    logprobs: log-probabilities of each token, if requested
    stop: the stop text that ended the text, or None
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: dict[str, Any]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stop: str | None = None

    def __repr__(self) -> str:
        """Return a line: the beginning of the text, how many tokens it has and how it ended."""
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        tokens = f"{len(self.token_ids)} token{'' if len(self.token_ids) == 1 else 's'}"
        return f"Completion({text!r}, {tokens}, finish_reason={self.finish_reason!r})"


@dataclass(frozen=True)
class Piece:
    """A piece of text, and the origin of its tokens.

    origin: "accepted" for accepted draft tokens; "corrected" for the target's token in place of a
        rejected one; "bonus" for the target's token after a wholly accepted draft; "plain" for
        tokens without a draft
    logprobs: log-probabilities of the tokens that complete the text, if requested
    tokens, passes: numbers of new tokens and of passes up to the pass that made it
    """

    text: str
    origin: str
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: int = 0
    passes: int = 0


class Stream:
    """The text of a request after each pass, and its `result` at the end.

    Leaving the loop, `close`, or dropping the last reference to the stream ends the request. Its
    result is then the output so far.
    """

    def __init__(self, pieces: Generator[Piece | Completion], interrupted: threading.Event) -> None:
        """interrupted: ends the request within one layer of the prefill, or one pass"""
        self._pieces = pieces
        self._interrupted = interrupted
        self._result: Completion | None = None

    @property
    def ended(self) -> bool:
        """Whether there is a result."""
        return self._result is not None

    @property
    def running(self) -> bool:
        """Whether a pass of the stream is running. The caller is then inside that pass."""
        return inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING

    @property
    def result(self) -> Completion:
        """The whole completion. Raises RuntimeError before the end of the stream, or if the stream
        was closed before it started.
        """
        if self._result is None:
            raise RuntimeError("the stream has not ended")
        return self._result

    def __iter__(self) -> Iterator[str]:
        with closing(self.pieces()) as pieces:
            for piece in pieces:
                yield piece.text

    def pieces(self) -> Iterator[Piece]:
        """Yield the text in pieces with their origins."""
        try:
            for piece in self._pieces:
                if isinstance(piece, Completion):
                    self._result = piece
                else:
                    yield piece
        except GeneratorExit:
            self.close()
            raise

    def interrupt(self) -> None:
        """End the request within one pass. Its result is its output so far."""
        self._interrupted.set()

    def close(self) -> None:
        """End the request. Raises UsageError if called from within one of its passes."""
        if sys.is_finalizing():
            # The copy threads are gone, so a pass would wait for them forever.
            return
        if self.running:
            raise UsageError("the request is in the middle of a pass: interrupt it first")
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_CREATED:
            self._pieces.close()
            return
        self.interrupt()
        for piece in self._pieces:
            if isinstance(piece, Completion):
                self._result = piece

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def until_stop(tokens: list[int], stops: frozenset[int]) -> tuple[list[int], bool]:
    """Return the tokens up to the first stop token, and whether there is one."""
    for i, token in enumerate(tokens, start=1):
        if token in stops:
            return tokens[:i], True
    return tokens, False


def pieces_of(
    text: TextStream,
    taken: list[int],
    step: Step,
    logprobs: Sequence[TokenLogprob],
    pending: list[TokenLogprob],
) -> tuple[list[Piece], int]:
    """Return the text of a step's tokens (the accepted draft tokens, then the target's own) in
    pieces, and the number of tokens up to a stop text.

    logprobs: log-probabilities of the tokens, if requested
    pending: log-probabilities of tokens whose text is not complete yet; updated in place
    """
    pieces: list[Piece] = []
    accepted, used = len(step.tokens) - 1, 0
    own = "plain" if not step.drafted else "bonus" if step.whole else "corrected"
    for tokens, origin in ((taken[:accepted], "accepted"), (taken[accepted:], own)):
        for some in text.portions(tokens) if tokens else ():
            pending += logprobs[used : used + len(some)]
            used += len(some)
            if piece := text.push(some):
                pieces.append(Piece(piece, origin, tuple(pending)))
                pending.clear()
            if text.stop is not None:
                return pieces, used
    return pieces, used
