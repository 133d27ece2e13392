"""How long drafts are, learned over all requests, and the decoder of each."""

from __future__ import annotations

from collections.abc import Collection

from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.autoregressive import Autoregressive, Decoder
from triforce_core.decoding.context import Context
from triforce_core.decoding.draft_length import Auto, DraftLength, Fixed
from triforce_core.decoding.hierarchy import Hierarchy, RetrievalModel
from triforce_core.decoding.levels import Middle
from triforce_core.decoding.models import Models
from triforce_core.params import SamplingParams
from triforce_core.settings import AUTO, AUTO_DRAFT_TOKENS

# Longest draft that `auto` chooses for a step of the retrieval model.
AUTO_INNER_TOKENS = 16
# What `auto` assumes of a level before it has seen any of its drafts, and its first draft.
_RETRIEVAL_ACCEPTANCE, _RETRIEVAL_FIRST = 0.95, 24
_DRAFTER_ACCEPTANCE, _DRAFTER_FIRST = 0.6, 4


class Drafting:
    """The levels below the target. Lengths chosen by `auto` are learned over all requests."""

    def __init__(self, models: Models) -> None:
        self._models = models
        method = models.method
        self._inner: DraftLength = Fixed(0)
        self._outer: DraftLength = Fixed(0)
        if models.budget:
            self._outer = _length(
                method.draft_tokens,
                AUTO_DRAFT_TOKENS,
                _RETRIEVAL_ACCEPTANCE,
                _RETRIEVAL_FIRST,
                by_confidence=True,
            )
            if method.has_drafter:
                self._inner = _length(
                    method.inner_draft_tokens,
                    AUTO_INNER_TOKENS,
                    _DRAFTER_ACCEPTANCE,
                    _DRAFTER_FIRST,
                )
        elif method.has_drafter:
            self._outer = _length(
                method.draft_tokens, AUTO_DRAFT_TOKENS, _DRAFTER_ACCEPTANCE, _DRAFTER_FIRST
            )

    def decoder(
        self, context: Context, params: SamplingParams, rule: Rule, stops: Collection[int]
    ) -> Decoder:
        """The decoder of one request. stops: tokens that end its text."""
        if not self._models.method.drafts:
            return Autoregressive(context, params, rule)
        proposer = context.drafter.proposer(params, rule)
        if context.retrieval:
            verifier = RetrievalModel(context, params)
            proposer = Middle(proposer, verifier, rule, self._inner, self._outer, stops)
        return Hierarchy(context, params, rule, proposer, self._outer, frozenset(stops))


def _length(
    tokens: int | str, most: int, acceptance: float, first: int, *, by_confidence: bool = False
) -> DraftLength:
    if tokens != AUTO:
        return Fixed(int(tokens))
    return Auto(most, acceptance, first, by_confidence=by_confidence)
