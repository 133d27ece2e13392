"""Plain decoding, one token per pass: the reference for every faster method."""

from __future__ import annotations

import time

import torch

from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.decoder import PassInput, Prefilled, Step
from triforce_core.decoding.distributions import distributions
from triforce_core.decoding.levels import check_token
from triforce_core.params import SamplingParams
from triforce_offload.link.waiting import come


class Autoregressive:
    """A decoder that runs the last token through the full model and draws the next token."""

    def __init__(self, context: Context, params: SamplingParams, rule: Rule) -> None:
        self._context = context
        self._params = params
        self._rule = rule
        self._last: torch.Tensor | None = None
        self._asked = 0.0

    def first(self, prompt: Prefilled) -> Step:
        """Decoder.first."""
        self._asked = time.perf_counter()
        return self.take(prompt.logits, 0.0)

    def next_pass(self, remaining: int) -> PassInput:
        """Decoder.next_pass."""
        self._asked = time.perf_counter()
        return PassInput(self._last, is_kept=True, more=remaining > 1)

    @torch.inference_mode()
    def take(self, logits: torch.Tensor, seconds: float) -> Step:
        """Decoder.take."""
        context = self._context
        self._last = self._rule.draw(
            distributions(logits, self._params, context.text), context.length
        )
        tokens = come(self._last).tolist()
        context.check_ranks()
        check_token(tokens[0])
        context.text.commit(tokens)
        context.trace.host("step", self._asked, time.perf_counter() - self._asked)
        return Step(tokens)
