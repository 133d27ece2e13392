"""Draft lengths learned over all requests, and the decoder of each request."""

from __future__ import annotations

from collections.abc import Collection

from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.autoregressive import Autoregressive
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.models import Models
from triforce_core.decoding.decoder import Decoder
from triforce_core.decoding.draft_length import Auto, DraftLength, Fixed
from triforce_core.decoding.levels import Tallies
from triforce_core.decoding.retrieval_level import RetrievalLevel, RetrievalVerifier
from triforce_core.decoding.speculative import Speculative
from triforce_core.decoding.trees.growth import Growth, of_retrieval_level
from triforce_core.decoding.trees.retrieval_tree import TreeCosts
from triforce_core.params import SamplingParams
from triforce_core.settings import AUTO_DRAFT_TOKENS

# Longest draft that `auto` chooses for a step of the retrieval level.
AUTO_INNER_TOKENS = 16
# For each level: the acceptance that `auto` assumes at first, and the length of its first draft.
_RETRIEVAL_ACCEPTANCE, _RETRIEVAL_FIRST = 0.95, 24
_DRAFTER_ACCEPTANCE, _DRAFTER_FIRST = 0.6, 4
# For n-grams that propose directly to the target. They propose only where the text repeats itself:
# in two tasks of scripts/rivals compare, continuation and code, .90 to .92 of their tokens were
# accepted.
_NGRAM_ACCEPTANCE, _NGRAM_FIRST = 0.85, 8


class Drafting:
    """The decoders of requests, and the draft lengths that they share.

    The lengths that `auto` chooses, and whether a level pays at all, are learned over all requests.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._choose_lengths()
        self._tree_costs = TreeCosts()

    def decoder(
        self,
        context: Context,
        params: SamplingParams,
        rule: Rule,
        stops: Collection[int],
        tallies: Tallies,
    ) -> Decoder:
        """Return a decoder for one request, with the levels that exist now.

        stops: tokens that end the generation
        tallies: counters of the request's drafts
        """
        if not self._models.method.drafts:
            return Autoregressive(context, params, rule)
        proposer = context.levels.drafter.proposer(params, rule)
        length, growth = self._outer, self._growth
        if context.levels.idle:
            length, growth = self._direct, None
        elif context.levels.retrieval:
            verifier = RetrievalVerifier(context, params)
            proposer = RetrievalLevel(
                proposer,
                verifier,
                rule,
                self._inner,
                self._outer,
                stops,
                tallies.retrieval,
                self._tree_costs,
                sampled=params.temperature > 0,
            )
        return Speculative(
            context,
            params,
            rule,
            proposer,
            length,
            growth,
            frozenset(stops),
            tallies.target,
        )

    def give_up(self, context: Context) -> bool:
        """Drop the levels that take device memory, for good. Return whether there were any.

        Decoders created earlier become invalid.
        """
        if not context.levels.give_up():
            return False
        self._choose_lengths()
        return True

    def _choose_lengths(self) -> None:
        """Begin to learn the lengths for the levels that exist now."""
        models = self._models
        self._inner: DraftLength = Fixed(0)
        self._outer: DraftLength = Fixed(0)
        # Of what the drafter proposes directly where the retrieval level would not pay.
        self._direct: DraftLength = Fixed(0)
        if models.budget:
            self._outer = self._retrieval_length()
            if models.method.has_drafter:
                self._direct = self._drafter_length()
                self._inner = self._length(
                    models.method.fixed_inner_draft_tokens,
                    min(AUTO_INNER_TOKENS, self._longest_draft),
                    _DRAFTER_ACCEPTANCE,
                    _DRAFTER_FIRST,
                    at_once=self._block > 0,
                )
        elif models.method.has_drafter:
            self._outer = self._drafter_length()
        self._growth = self._make_growth()

    def _make_growth(self) -> Growth | None:
        method, small = self._models.method, self._models.small
        if not method.branches or (self._models.budget and small and small.joins):
            # Above a head the retrieval level drafts chains.
            return None
        needs, asked = self._models.runtime.plan.requirements, method.fixed_tree is not None
        deepest, nodes = needs.max_draft_tokens, method.fixed_tree or needs.max_draft_tokens
        if asked:
            deepest = method.fixed_draft_tokens or deepest
        if not self._models.budget:
            if not method.has_drafter:
                return None
            if self._block:
                deepest = min(deepest, self._block - 1)
            texts = needs.sequences
            return Growth(nodes, deepest, asked=asked, texts=texts, at_once=self._block > 0)
        pays = method.grows_trees and (asked or self._models.runtime.streams)
        if self._models.target.config.recurrent_layers or not pays:
            # Where nothing streams a pass costs little, and chains learn whether drafts pay at all.
            return None
        return Growth(nodes, deepest, asked=asked, prior=of_retrieval_level, chains=False)

    def _retrieval_length(self) -> DraftLength:
        return self._length(
            self._models.method.fixed_draft_tokens,
            AUTO_DRAFT_TOKENS,
            _RETRIEVAL_ACCEPTANCE,
            _RETRIEVAL_FIRST if self._models.runtime.streams else _DRAFTER_FIRST,
            by_confidence=True,
        )

    def _drafter_length(self) -> DraftLength:
        assumed = (_DRAFTER_ACCEPTANCE, _DRAFTER_FIRST)
        if not self._models.small:
            assumed = (_NGRAM_ACCEPTANCE, _NGRAM_FIRST)
        tokens, most = self._models.method.fixed_draft_tokens, self._longest_draft
        return self._length(tokens, most, *assumed, at_once=self._block > 0)

    @property
    def _block(self) -> int:
        """Number of rows that the drafter computes at once; 0 if it drafts token by token."""
        small = self._models.small
        return small.joins.block if small and small.joins else 0

    @property
    def _longest_draft(self) -> int:
        """Number of tokens of the drafter's longest draft that `auto` chooses."""
        return min(AUTO_DRAFT_TOKENS, self._block - 1) if self._block else AUTO_DRAFT_TOKENS

    def _length(
        self,
        tokens: int | None,
        most: int,
        acceptance: float,
        first: int,
        *,
        by_confidence: bool = False,
        at_once: bool = False,
    ) -> DraftLength:
        if tokens is not None:
            return Fixed(tokens)
        # If nothing streams, a pass is cheap, and drafts may not pay.
        plain_first = not self._models.runtime.streams
        return Auto(
            *(most, acceptance, first),
            by_confidence=by_confidence,
            plain_first=plain_first,
            at_once=at_once,
        )
