"""Decoders: they ask for passes of the full model, and make tokens of what passes give.

`Batch` runs the passes, each for one request or for several.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class Prefilled(NamedTuple):
    """A prompt that was prefilled.

    logits: after its last token, [1, vocab]
    reused: tokens whose KV was there before
    scored: the last tokens, by which its chunks were scored
    """

    logits: torch.Tensor
    reused: int
    scored: int


class Ask(NamedTuple):
    """A pass over some rows that follow what a context keeps.

    tokens: [rows]; parents: for each row the row it follows, -1 for what is kept; None where each
        follows the one before it
    is_kept: whether its one row is kept, whatever the pass gives; more: whether another such pass
        follows
    """

    tokens: torch.Tensor
    parents: tuple[int, ...] | None = None
    is_kept: bool = False
    more: bool = False


class Step(NamedTuple):
    """What a pass gave.

    tokens: new ones, at least one
    drafted: how many a draft had proposed; of `tokens`, all but the last were among them
    whole: whether they end where the draft did
    rows: of the pass, by whose logits they were drawn; None where each follows the one before it
    scored: rows of the pass by which chunks are chosen for the next one; None if none are
    """

    tokens: list[int]
    drafted: int = 0
    whole: bool = False
    rows: tuple[int, ...] | None = None
    scored: int | None = None


class Decoder(Protocol):
    """Decodes one request over a context whose text is the prompt: `first`, then `ask` and `take`
    by turns.
    """

    def first(self, prompt: Prefilled) -> Step:
        """Draw the token that follows the prompt. Raises CheckpointError as `take` does."""

    def ask(self, remaining: int) -> Ask:
        """Return the pass that gives the next tokens, at most `remaining`."""

    def take(self, logits: torch.Tensor, seconds: float) -> Step:
        """Return the tokens that a pass gave, by its logits, float32 [rows, vocab].

        seconds: that the pass took; of one that others share, this one's part of them
        Raises CheckpointError if the model computes something that is no number.
        """


def advance(decoder: Decoder, run: Callable[[Ask], torch.Tensor], remaining: int) -> Step:
    """Return the next tokens, at most `remaining`. run: `Context.run`. Raises LinkError."""
    ask = decoder.ask(remaining)
    began = time.perf_counter()
    return decoder.take(run(ask), time.perf_counter() - began)
