"""What a request gives: text as each pass lands, then the whole completion."""

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


class TokenLogprob(NamedTuple):
    """A token, its log-probability, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """What a request gave.

    token_ids: the new tokens only, an end-of-text token included
    finish_reason: "stop", "length" or "interrupted"; "error" of a stream that raised one
    stats: see docs/stats.md
    logprobs: of each token, if they were asked for
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: dict[str, Any]
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """Text, and where its tokens came from: a draft's "accepted" ones, the target's own
    "corrected" one in place of a rejected one, the "bonus" after a draft that held wholly, or
    "plain" ones with no draft.

    logprobs: of the tokens that complete it, if they were asked for
    """

    text: str
    origin: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Stream:
    """The text of a request, as each pass lands; `result` once it has ended.

    A loop that is left, `close`, or letting go of the stream ends the request: its result is what
    was generated until then.
    """

    def __init__(self, pieces: Generator[Piece | Completion], interrupted: threading.Event) -> None:
        """interrupted: ends the request within a layer of its prompt, or a pass."""
        self._pieces = pieces
        self._interrupted = interrupted
        self._result: Completion | None = None

    @property
    def ended(self) -> bool:
        """Whether there is a result."""
        return self._result is not None

    @property
    def running(self) -> bool:
        """Whether it is in the middle of a pass: somebody asks from within one."""
        return inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING

    @property
    def result(self) -> Completion:
        """The whole completion. Raises RuntimeError before the stream has ended, or if it was
        closed before it began.
        """
        if self._result is None:
            raise RuntimeError("the stream has not ended")
        return self._result

    def __iter__(self) -> Iterator[str]:
        with closing(self.pieces()) as pieces:
            for piece in pieces:
                yield piece.text

    def pieces(self) -> Iterator[Piece]:
        """The same text with the origin of each piece."""
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
        """Ends the request within one pass; what it gave so far is its result."""
        self._interrupted.set()

    def close(self) -> None:
        """Ends the request. Raises UsageError from within one of its passes."""
        if sys.is_finalizing():
            # Threads that carry copies are gone: a pass would wait for them in vain.
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
    """Tokens up to the first that ends the text, and whether there is one."""
    for i, token in enumerate(tokens, start=1):
        if token in stops:
            return tokens[:i], True
    return tokens, False


def pieces_of(
    text: TextStream,
    taken: list[int],
    step: Step,
    logprobs: Sequence[TokenLogprob],
    untold: list[TokenLogprob],
) -> tuple[list[Piece], int]:
    """The text of a step's tokens, those of the draft, then the target's own; and how many of them
    there are until the text stops.

    logprobs: of the tokens, if they are told; untold: of those whose text has not come yet
    """
    pieces: list[Piece] = []
    accepted, used = len(step.tokens) - 1, 0
    own = "plain" if not step.drafted else "bonus" if step.whole else "corrected"
    for tokens, origin in ((taken[:accepted], "accepted"), (taken[accepted:], own)):
        for some in text.portions(tokens) if tokens else ():
            untold += logprobs[used : used + len(some)]
            used += len(some)
            if piece := text.push(some):
                pieces.append(Piece(piece, origin, tuple(untold)))
                untold.clear()
            if text.stopped:
                return pieces, used
    return pieces, used
