"""What decodes a request: asks for passes of the full model, and makes tokens of what they give.

Whoever runs the passes may run one for several requests at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class Prompt(NamedTuple):
    """A prompt that was read.

    logits: after its last token, [1, vocab]
    reused: how many of its tokens were kept from the text before
    scored: how many of its last tokens its chunks were scored by
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
    """Decodes one request over a context whose text is the prompt: `ask` and `take` by turns."""

    def start(self, prompt: Prompt) -> None:
        """Takes the prompt that the context has read."""

    def ask(self, remaining: int) -> Ask | None:
        """The pass that gives the next tokens, at most `remaining`; None if the prompt's did."""

    def take(self, logits: torch.Tensor | None, seconds: float) -> Step:
        """The tokens that follow: the first by the prompt's logits, later ones by those of the pass
        that was asked for, float32 [rows, vocab].

        seconds: that the pass took; of one that others share, this one's part of them
        Raises CheckpointError if the model computes something that is no number.
        """


def advance(decoder: Decoder, run: Callable[[Ask], torch.Tensor], remaining: int) -> Step:
    """The next tokens, at most `remaining`. run: `Context.run`. Raises LinkError."""
    ask = decoder.ask(remaining)
    began = time.perf_counter()
    logits = None if ask is None else run(ask)
    return decoder.take(logits, time.perf_counter() - began)
