"""Decoders: they ask for passes of the full model and turn the logits into tokens.

`Batch` runs the passes, each for one request or for several.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class Prefilled(NamedTuple):
    """A prompt that was prefilled.

    logits: logits after its last token, [1, vocab]
    reused: number of tokens whose KV was reused
    scored: number of tokens at its end whose queries scored its chunks
    """

    logits: torch.Tensor
    reused: int
    scored: int


class PassInput(NamedTuple):
    """A pass over rows that follow the kept tokens of a context.

    tokens: [rows]
    parents: for each row the row that it follows, or -1 if it follows the kept tokens; None if
        each row follows the one before it
    is_kept: whether the pass has one row, which is kept whatever the logits are
    more: whether another pass of this kind follows
    """

    tokens: torch.Tensor
    parents: tuple[int, ...] | None = None
    is_kept: bool = False
    more: bool = False


class Step(NamedTuple):
    """The result of a pass.

    tokens: the new tokens, at least one; all but the last are accepted draft tokens
    drafted: number of draft tokens that the pass verified
    whole: whether the draft was accepted to its end
    rows: the rows of the pass from whose logits the tokens were drawn; None for a chain
    scored: number of rows of the pass by which the chunks for the next pass are chosen; None if
        no chunks are chosen
    """

    tokens: list[int]
    drafted: int = 0
    whole: bool = False
    rows: tuple[int, ...] | None = None
    scored: int | None = None


class Decoder(Protocol):
    """Decoder of one request, over a context that holds the prompt.

    Call `first` once, then `next_pass` and `take` in turn.
    """

    def first(self, prompt: Prefilled) -> Step:
        """Draw the token that follows the prompt. Raises CheckpointError as `take` does."""

    def next_pass(self, remaining: int) -> PassInput:
        """Return the pass that yields the next tokens, at most `remaining` of them."""

    def take(self, logits: torch.Tensor, seconds: float) -> Step:
        """Return the new tokens, given the logits of the pass, float32 [rows, vocab].

        seconds: duration of the pass, or this request's part of it if several share the pass
        Raises CheckpointError if the model's logits are not finite.
        """


def advance(decoder: Decoder, run: Callable[[PassInput], torch.Tensor], remaining: int) -> Step:
    """Return the next tokens, at most `remaining` of them.

    run: `Context.run`
    Raises LinkError.
    """
    pass_input = decoder.next_pass(remaining)
    began = time.perf_counter()
    return decoder.take(run(pass_input), time.perf_counter() - began)
