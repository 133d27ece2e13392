"""Plain decoding, one token a pass: the oracle that every faster method is held against."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch

from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.context import Context, Prompt
from triforce_core.decoding.laws import laws
from triforce_core.decoding.levels import check_token
from triforce_core.params import SamplingParams


class Step(NamedTuple):
    """tokens: new ones, at least one. drafted: how many a draft had proposed; of `tokens`, all but
    the last were among them.
    """

    tokens: list[int]
    drafted: int


class Decoder(Protocol):
    """Decodes one request over a context whose text is the prompt."""

    def start(self, prompt: Prompt) -> None:
        """Takes the prompt that the context has read."""

    def step(self, remaining: int) -> Step:
        """The next tokens, at most `remaining`: the first from the prompt's logits, later ones from
        one pass.

        Raises CheckpointError if the model computes something that is no number.
        """


class Autoregressive:
    """Feeds the last token through the full model and draws the next from its law."""

    def __init__(self, context: Context, params: SamplingParams, rule: Rule) -> None:
        self._context = context
        self._params = params
        self._rule = rule
        self._last: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None

    def start(self, prompt: Prompt) -> None:
        """Decoder.start."""
        self._logits = prompt.logits

    @torch.inference_mode()
    def step(self, remaining: int) -> Step:
        """Decoder.step."""
        began, context = time.perf_counter(), self._context
        passes = context.passes
        if self._last is not None:
            self._logits = context.feed_one(self._last, more=remaining > 1)
        self._last = self._rule.draw(laws(self._logits, self._params, context.text), passes.length)
        tokens = self._last.tolist()
        context.arrived()
        check_token(tokens[0])
        context.text.commit(tokens)
        passes.trace.host("step", began, time.perf_counter() - began)
        return Step(tokens, 0)
