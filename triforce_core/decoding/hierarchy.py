"""Decoding by drafts: a proposer, one pass of the full model over what it proposed, acceptance."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import torch

from offload.memory.device import OUT_OF_MEMORY
from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.autoregressive import Step
from triforce_core.decoding.context import Context, Prompt
from triforce_core.decoding.draft_length import DraftLength
from triforce_core.decoding.laws import laws
from triforce_core.decoding.levels import Proposer, Round, Tally, check_token, speculate
from triforce_core.params import SamplingParams


class Target:
    """The full model as a verifier: a pass over weights and KV wherever they live."""

    def __init__(self, context: Context, params: SamplingParams) -> None:
        self.device = context.model.device
        self._context = context
        self._params = params

    def laws(self, tokens: torch.Tensor) -> torch.Tensor:
        """Verifier.laws."""
        context = self._context
        return laws(context.verify(tokens), self._params, context.text, tokens[1:])

    def keep(self, rows: Sequence[int]) -> None:
        """Verifier.keep."""
        self._context.keep(rows)


# Logits of what drafts lie within these.
_MOST_LOGIT = 1e30


class RetrievalModel:
    """The target's own weights, or what stands in for them, over the retrieval cache, as a
    verifier. Whatever it computes is a law: the text does not depend on it.
    """

    def __init__(self, context: Context, params: SamplingParams) -> None:
        """context: of an engine with such a level."""
        self.device = context.model.device
        self._context = context
        self._params = params

    def laws(self, tokens: torch.Tensor) -> torch.Tensor:
        """Verifier.laws."""
        logits = self._context.draft(tokens).nan_to_num_(0.0, _MOST_LOGIT, -_MOST_LOGIT)
        return laws(logits, self._params, self._context.text, tokens[1:])

    def keep(self, rows: Sequence[int]) -> None:
        """Verifier.keep."""
        self._context.keep_drafted(rows)


class Hierarchy:
    """Proposes, verifies in one pass, accepts, keeps, rolls back.

    A pass never drafts more than may still be said, so a length limit cuts nothing; what follows an
    end of text is dropped, which leaves the law of what comes before it as it is.
    """

    def __init__(
        self,
        context: Context,
        params: SamplingParams,
        rule: Rule,
        proposer: Proposer,
        length: DraftLength,
        stops: Collection[int],
        tally: Tally,
    ) -> None:
        """length: of the proposer's drafts. stops: tokens that end the text. tally: of drafts."""
        self._tally = tally
        self._context = context
        self._params = params
        self._rule = rule
        self._proposer = proposer
        self._length = length
        self._stops = stops
        self._target = Target(context, params)
        self._prompt: Prompt | None = None
        # How many tokens the next pass's chunks are chosen by, until its copies have begun.
        self._due: int | None = None

    def start(self, prompt: Prompt) -> None:
        """Decoder.start."""
        self._prompt = prompt

    @torch.inference_mode()
    def step(self, remaining: int) -> Step:
        """Decoder.step."""
        context = self._context
        if self._prompt is not None:
            step, scored = self._first(self._prompt), self._prompt.scored
            self._prompt = None
        else:
            if self._due is not None:
                self._begin()
            # If the round fails: whatever drafts begins anew then.
            self._due = 1
            step = self._round(remaining)
            scored = len(step.tokens)
        context.text.commit(step.tokens)
        if len(step.tokens) < remaining and self._stops.isdisjoint(step.tokens):
            self._due = scored
            try:
                self._begin()
            except OUT_OF_MEMORY:
                # What was accepted holds: the next step tries again, and says so if it cannot.
                context.end()
        return step

    def _begin(self) -> None:
        self._context.begin(self._due)
        self._due = None

    def _first(self, prompt: Prompt) -> Step:
        law = laws(prompt.logits, self._params, self._context.text)
        tokens = self._rule.draw(law, self._context.text.committed).tolist()
        self._context.arrived()
        check_token(tokens[0])
        return Step(tokens, 0)

    def _round(self, remaining: int) -> Step:
        context = self._context
        count = self._length.choose(remaining - 1)
        began = time.perf_counter()
        outcome = speculate(self._proposer, self._target, self._rule, context.text, count)
        context.arrived()
        self._trace(began, outcome)
        self._tally.count(outcome)
        self._length.observe(outcome)
        return Step(outcome.tokens, outcome.drafted)

    def _trace(self, began: float, outcome: Round) -> None:
        """Says in the trace what a round did."""
        host, verified = self._context.passes.trace.host, began + outcome.draft_seconds
        drafted, accepted = outcome.drafted, outcome.accepted
        host("draft", began, outcome.draft_seconds, tokens=drafted)
        host("verify", verified, outcome.verify_seconds, tokens=drafted, accepted=accepted)
