"""Decoding by drafts: a proposer, one pass of the full model over what it proposed, acceptance."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch

from offload.link.waiting import come
from triforce_core.decoding.acceptance import Draft, Rule
from triforce_core.decoding.context import Context
from triforce_core.decoding.decoder import Ask, Prompt, Step
from triforce_core.decoding.draft_length import DraftLength
from triforce_core.decoding.growth import Growth
from triforce_core.decoding.laws import laws
from triforce_core.decoding.levels import (
    Offer,
    Proposer,
    Round,
    Tally,
    Text,
    check_token,
    offer,
    settle,
)
from triforce_core.params import SamplingParams

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
        growth: Growth | None,
        stops: Collection[int],
        tally: Tally,
    ) -> None:
        """length: of the proposer's drafts. growth: of those that branch, if any may: the proposer
        is a Brancher then. stops: tokens that end the text. tally: of drafts.
        """
        self._tally = tally
        self._context = context
        self._params = params
        self._rule = rule
        self._proposer = proposer
        self._length = length
        self._growth = growth
        self._stops = stops
        # Whether the draft at hand was to branch.
        self._branches = False
        self._prompt: Prompt | None = None
        self._offer: Offer | None = None

    def start(self, prompt: Prompt) -> None:
        """Decoder.start."""
        self._prompt = prompt

    @torch.inference_mode()
    def ask(self, remaining: int) -> Ask | None:
        """Decoder.ask."""
        if self._prompt is not None:
            return None
        context = self._context
        propose = partial(self._propose, context.text, remaining - 1)
        self._offer = offer(propose, context.text, context.model.device)
        branches = self._offer.draft.branches
        return Ask(self._offer.fed, branches and branches.of_feed)

    def _propose(self, text: Text, most: int) -> Draft:
        growth = self._growth
        nodes = growth.choose() if growth and most else 0
        self._branches = nodes > 0
        if nodes:
            return self._proposer.branch(text, growth, nodes, min(most, growth.deepest))
        return self._proposer.propose(text, self._length.choose(most))

    @torch.inference_mode()
    def take(self, logits: torch.Tensor | None, seconds: float) -> Step:
        """Decoder.take."""
        if logits is None:
            step = self._first(self._prompt)
            self._prompt = None
        else:
            step = self._round(logits, seconds)
        self._context.text.commit(step.tokens)
        return step

    def _first(self, prompt: Prompt) -> Step:
        law = laws(prompt.logits, self._params, self._context.text)
        tokens = come(self._rule.draw(law, self._context.text.committed)).tolist()
        self._context.arrived()
        check_token(tokens[0])
        return Step(tokens, scored=prompt.scored)

    def _round(self, logits: torch.Tensor, seconds: float) -> Step:
        context, made = self._context, self._offer
        # What branches is drafted only for laws that nothing but the logits changes.
        own = laws(logits, self._params, context.text, made.fed[1:])
        outcome = settle(made, own, self._rule, context.text, context.keep, seconds)
        context.arrived()
        self._trace(made.began, outcome)
        self._tally.count(outcome)
        if self._growth:
            self._growth.observe(outcome, tree=self._branches)
        if self._branches:
            self._length.count(outcome)
        else:
            self._length.observe(outcome)
        rows = outcome.branches and tuple(outcome.path)
        return Step(outcome.tokens, outcome.drafted, outcome.whole, rows, len(outcome.tokens))

    def _trace(self, began: float, outcome: Round) -> None:
        """Says in the trace what a round did."""
        host, verified = self._context.passes.trace.host, began + outcome.draft_seconds
        drafted, accepted = outcome.drafted, outcome.accepted
        host("draft", began, outcome.draft_seconds, tokens=drafted)
        host("verify", verified, outcome.verify_seconds, tokens=drafted, accepted=accepted)
