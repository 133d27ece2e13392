"""Speculative decoding: a proposer, one pass of the full model over its draft, acceptance."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch

from triforce_core.decoding.acceptance import Draft, Rule
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.decoder import PassInput, Prefilled, Step
from triforce_core.decoding.distributions import distributions
from triforce_core.decoding.draft_length import DraftLength
from triforce_core.decoding.levels import (
    Proposed,
    Proposer,
    Round,
    Tally,
    check_token,
    propose_draft,
    verify_draft,
)
from triforce_core.decoding.trees.growth import Growth
from triforce_core.decoding.trees.prefixes import Prefixes
from triforce_core.params import SamplingParams
from triforce_offload.errors import CheckpointError
from triforce_offload.link.waiting import come


class Speculative:
    """A decoder that drafts, verifies the draft in one pass, and keeps the accepted tokens.

    A draft never has more tokens than the request may still generate, so a length limit cuts
    nothing. Tokens after an end-of-text token are dropped, which does not change the distribution
    of the tokens before it.
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
        """length: length of the proposer's drafts
        growth: growth of tree drafts, for which the proposer must be a Brancher; None for no trees
        stops: tokens that end the generation
        tally: counters of the drafts
        """
        self._tally = tally
        self._context = context
        self._params = params
        self._rule = rule
        self._proposer = proposer
        self._length = length
        self._growth = growth
        self._stops = stops
        # Whether the current draft was meant to be a tree.
        self._branches = False
        self._proposed: Proposed | None = None

    @torch.inference_mode()
    def first(self, prompt: Prefilled) -> Step:
        """Decoder.first."""
        context = self._context
        probs = distributions(prompt.logits, self._params, context.text)
        tokens = come(self._rule.draw(probs, context.text.committed)).tolist()
        context.check_ranks()
        check_token(tokens[0])
        context.text.commit(tokens)
        return Step(tokens, scored=prompt.scored)

    @torch.inference_mode()
    def next_pass(self, remaining: int) -> PassInput:
        """Decoder.next_pass."""
        context = self._context
        propose = partial(self._propose, context.text, remaining - 1)
        self._proposed = propose_draft(propose, context.text, context.model.device)
        branches = self._proposed.draft.branches
        return PassInput(self._proposed.fed, branches and branches.of_batch)

    def _propose(self, text: Text, most: int) -> Draft:
        growth = self._growth
        nodes = growth.choose() if growth and most else 0
        self._branches = nodes > 0
        if nodes:
            return self._proposer.branch(text, growth, nodes, min(most, growth.deepest))
        return self._proposer.propose(text, self._length.choose(most))

    @torch.inference_mode()
    def take(self, logits: torch.Tensor, seconds: float) -> Step:
        """Decoder.take."""
        context, made = self._context, self._proposed
        own = distributions(logits, self._params, context.text, self._prefixes(made))
        try:
            outcome = verify_draft(made, own, self._rule, context.text, context.keep, seconds)
        except CheckpointError:
            # Useless numbers, but the ranks have computed them all.
            context.check_ranks()
            raise
        context.check_ranks()
        self._trace(made.began, outcome)
        self._tally.count(outcome)
        if self._growth:
            self._growth.observe(outcome, tree=self._branches)
        if not self._branches:
            self._length.observe(outcome)
        context.text.commit(outcome.tokens)
        rows, path = outcome.branches and tuple(outcome.path), outcome.path
        # Of a tree's rows, the first that were all kept count for the scores of chunks.
        scored = next((place for place, row in enumerate(path) if place != row), len(path))
        return Step(outcome.tokens, outcome.drafted, outcome.whole, rows, scored)

    def _prefixes(self, made: Proposed) -> Prefixes | None:
        """Return what each row of a pass follows, if distributions depend on it."""
        if not self._params.changes_logits:
            return None
        tokens, branches = made.fed[1:], made.draft.branches
        if branches is None:
            return Prefixes.of_chain(tokens, len(made.fed))
        return Prefixes.of_tree(tokens, branches.parents)

    def _trace(self, began: float, outcome: Round) -> None:
        """Record a round in the trace."""
        host, verified = self._context.trace.host, began + outcome.draft_seconds
        drafted, accepted = outcome.drafted, outcome.accepted
        host("draft", began, outcome.draft_seconds, tokens=drafted)
        host("verify", verified, outcome.verify_seconds, tokens=drafted, accepted=accepted)
