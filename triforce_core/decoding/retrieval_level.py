"""The retrieval level: the target's weights, or copies of them, over the retrieval cache.

It verifies the drafter below it, and is thereby a proposer for the full model above it: of chains,
or of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from triforce_core.decoding.acceptance import Draft, Rule
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import conditioned, distributions, limited
from triforce_core.decoding.draft_length import DraftLength
from triforce_core.decoding.levels import Nothing, Proposer, Tally, Verifier, speculate
from triforce_core.decoding.trees.growth import Growth
from triforce_core.decoding.trees.prefixes import Prefixes
from triforce_core.decoding.trees.retrieval_tree import WIDEST, RetrievalTree, TreeCosts
from triforce_core.decoding.trees.tree_verifier import Evaluated
from triforce_core.params import SamplingParams
from triforce_offload.memory.device import put


class RetrievalVerifier:
    """The retrieval level as a verifier: the target's weights, or copies of them, over the
    retrieval cache.

    Non-finite logits are replaced. The output distribution does not depend on this level.
    """

    def __init__(self, context: Context, params: SamplingParams) -> None:
        """context: a context with a retrieval level"""
        self.device = context.model.device
        self._context = context
        self._params = params

    def probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Verifier.probs."""
        logits = limited(self._context.levels.draft(tokens))
        after = Prefixes.of_chain(tokens[1:], len(tokens))
        return distributions(logits, self._params, self._context.text, after)

    def evaluate(
        self,
        tokens: torch.Tensor,
        parents: Sequence[int],
        rule: Rule,
        positions: torch.Tensor,
        after: Callable[[], Prefixes],
    ) -> Evaluated:
        """TreeVerifier.evaluate."""
        logits = limited(self._context.levels.draft(tokens, tuple(parents)))
        if self._params.changes_logits:
            logits = conditioned(logits, self._params, self._context.text, after())
        likely = rule.likeliest(logits, self._params, positions, WIDEST)
        return Evaluated(distributions(logits, self._params), *likely)

    def keep(self, rows: Sequence[int]) -> None:
        """Verifier.keep, TreeVerifier.keep."""
        self._context.levels.keep_drafted(rows)


class RetrievalLevel:
    """A proposer that drafts by rounds of `speculate` until there are enough tokens, each with the
    verifier's own distribution.
    """

    def __init__(
        self,
        proposer: Proposer,
        verifier: Verifier,
        rule: Rule,
        length: DraftLength,
        length_above: DraftLength,
        stops: Collection[int],
        tally: Tally,
        costs: TreeCosts | None = None,
        *,
        sampled: bool = True,
    ) -> None:
        """verifier: a TreeVerifier too, if trees are drafted
        length: length of the proposer's drafts
        length_above: length of this level's own drafts, if they are chains
        stops: tokens after which nothing is proposed
        tally: counters of the proposer's drafts
        costs: seconds of forwards that grow trees
        sampled: whether tokens are drawn at random, at a temperature above 0
        """
        self.tally = tally
        self._proposer = proposer
        self._verifier = verifier
        self._rule = rule
        self._length = length
        self._length_above = length_above
        self._nothing = Nothing(verifier.device)
        self._stops = stops
        self._costs = costs or TreeCosts()
        self._sampled = sampled

    def branch(self, text: Text, growth: Growth, nodes: int, deepest: int) -> Draft:
        """Brancher.branch."""
        tree = RetrievalTree(
            text,
            self._verifier,
            self._proposer,
            self._rule,
            growth,
            self._costs,
            self._length,
            self._stops,
            self.tally,
            sampled=self._sampled,
        )
        while tree.grow(nodes, deepest):
            pass
        return tree.draft(nodes)

    def propose(self, text: Text, count: int) -> Draft:
        """Proposer.propose: a chain."""
        if not count:
            return self._nothing.propose(text, count)
        start, probs, confidence = len(text.tokens), [], []
        ended = False
        try:
            while (
                not ended
                and (left := start + count - len(text.tokens))
                and (not confidence or self._length_above.goes_on(confidence))
            ):
                outcome = speculate(
                    self._proposer, self._verifier, self._rule, text, self._length.choose(left - 1)
                )
                self.tally.count(outcome)
                self._length.observe(outcome)
                text.tokens += outcome.tokens
                probs.append(outcome.probs)
                confidence += outcome.peaks
                ended = any(token in self._stops for token in outcome.tokens)
            tokens = text.tokens[start:]
        finally:
            del text.tokens[start:]
        if ended:
            # Nothing follows an end-of-text token, and stopping at a drawn token adds no bias.
            first = next(i for i, token in enumerate(tokens) if token in self._stops)
            tokens = tokens[: first + 1]
        return Draft(
            put(tokens, self._verifier.device),
            torch.cat(probs)[: len(tokens)],
            confidence[: len(tokens)],
        )
