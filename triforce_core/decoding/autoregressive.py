"""Plain decoding, one token a pass: the oracle that every faster method is held against."""

from __future__ import annotations

import time

import torch

from offload.link.waiting import come
from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.context import Context
from triforce_core.decoding.decoder import Ask, Prompt, Step
from triforce_core.decoding.laws import laws
from triforce_core.decoding.levels import check_token
from triforce_core.params import SamplingParams


class Autoregressive:
    """Feeds the last token through the full model and draws the next from its law."""

    def __init__(self, context: Context, params: SamplingParams, rule: Rule) -> None:
        self._context = context
        self._params = params
        self._rule = rule
        self._last: torch.Tensor | None = None
        self._prompt: Prompt | None = None
        self._asked = 0.0

    def start(self, prompt: Prompt) -> None:
        """Decoder.start."""
        self._prompt = prompt

    def ask(self, remaining: int) -> Ask | None:
        """Decoder.ask."""
        self._asked = time.perf_counter()
        if self._last is None:
            return None
        return Ask(self._last, is_kept=True, more=remaining > 1)

    @torch.inference_mode()
    def take(self, logits: torch.Tensor | None, seconds: float) -> Step:
        """Decoder.take."""
        context = self._context
        logits = self._prompt.logits if logits is None else logits
        passes = context.passes
        self._last = self._rule.draw(laws(logits, self._params, context.text), passes.length)
        tokens = come(self._last).tolist()
        context.arrived()
        check_token(tokens[0])
        context.text.commit(tokens)
        passes.trace.host("step", self._asked, time.perf_counter() - self._asked)
        return Step(tokens)
