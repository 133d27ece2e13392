"""How drafts branch: which tokens a tree takes in, and whether a tree or a chain is drafted."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Protocol

from triforce_core.decoding.draft_length import Line
from triforce_core.decoding.tree import Branches


class Grown(Protocol):
    """What growing is learned from: `levels.Round`."""

    branches: Branches | None
    path: Sequence[int]
    confidence: Sequence[float]
    accepted: int
    drafted: int
    draft_seconds: float
    verify_seconds: float
    warm: bool


class Growth:
    """Learns how likely drafted tokens hold, and so which of them are worth a row of a pass.

    The value of a token is the chance that it is reached and holds: its parent's, times the chance
    that its elder siblings do not, times its own. A tree takes in what has the greatest values, as
    Sequoia's does (Chen et al., 2024), with chances that the drafter's probabilities tell, as
    EAGLE-2's does (Li et al., 2024). Each token adds its value to what a pass gives, and costs what
    drafting and verifying it takes: what costs more than it is worth is left out.

    Only drafted tokens and their laws decide, and of a token that is drawn from a law nothing that
    depends on what was drawn: the output law is untouched.
    """

    def __init__(self, nodes: int, deepest: int, *, asked: bool) -> None:
        """nodes: tokens of the largest tree; deepest: of its longest path. asked: whether every
        draft shall be one; else one is made where it was measured to be faster than a chain.
        """
        self.deepest = deepest
        self._nodes = nodes
        self._asked = asked
        self._examined = [[0.0] * (len(_SURE) + 1) for _ in range(_RANKS)]
        self._held = [[0.0] * (len(_SURE) + 1) for _ in range(_RANKS)]
        self._least = 1 / nodes
        self._chain, self._tree = _Rate(), _Rate()
        self._rounds = 0

    def choose(self) -> int:
        """Tokens of the next tree at most, 0 to draft a chain."""
        if self._asked:
            return self._nodes
        self._rounds += 1
        if self._chain.rounds < _FIRST_ROUNDS or self._tree.rounds < _FIRST_ROUNDS:
            tree = self._chain.rounds >= _FIRST_ROUNDS
        else:
            tree = self._tree.seconds_per_token < self._chain.seconds_per_token
            # Now and then the other is tried: the text may have changed.
            tree ^= self._rounds % _TRY_EVERY == 0
        return self._nodes if tree else 0

    def chance(self, rank: int, sure: float) -> float:
        """That a child holds if its elder siblings do not.

        rank: how many these are. sure: how likely the drafter finds it among what they leave
        """
        kind, degree = min(rank, _RANKS - 1), bisect(_SURE, sure)
        held = self._held[kind][degree] + _PRIOR_TOKENS * _PRIOR_SHARE * sure
        return min(held / (self._examined[kind][degree] + _PRIOR_TOKENS), _SUREST)

    @property
    def least(self) -> float:
        """The least value of a token that is worth its row, wherever there is room."""
        if not self._tree.rounds or self._asked:
            return 0.0
        return min(1.0, self._tree.seconds_per_row / self._tree.seconds_per_token)

    @property
    def level_least(self) -> float:
        """The same for who takes in a level at a time, and knows nothing of deeper ones: so much
        that a tree just becomes full.
        """
        return max(self.least, self._least)

    def may_bear(self, value: float) -> bool:
        """Whether any child of a row of some value may be worth its own."""
        return value * _SUREST >= self.level_least

    def grew(self, nodes: int) -> None:
        """Says how large a tree became that `level_least` has ruled."""
        full = nodes >= self._nodes
        self._least = min(0.5, max(1e-4, self._least * (_HIGHER if full else _LOWER)))

    def observe(self, outcome: Grown) -> None:
        """Learns from a round, of a tree or a chain."""
        rate = self._chain if outcome.branches is None else self._tree
        if outcome.warm:
            rate.observe(outcome)
        if outcome.branches is None:
            return
        for counts in (*self._examined, *self._held):
            counts[:] = [count * _MEMORY for count in counts]
        for row, holds in outcome.branches.examined(outcome.path):
            rank = outcome.branches.children[outcome.branches.parents[row - 1]].index(row)
            kind, degree = min(rank, _RANKS - 1), bisect(_SURE, outcome.confidence[row - 1])
            self._examined[kind][degree] += 1
            self._held[kind][degree] += holds


class _Rate:
    """Seconds of rounds, and what they gave, faded."""

    def __init__(self) -> None:
        self.rounds = 0
        self._seconds = self._tokens = 0.0
        self._draft_seconds = self._drafted = 0.0
        self._verify = Line()

    def observe(self, outcome: Grown) -> None:
        self.rounds += 1
        self._verify.observe(outcome.drafted, outcome.verify_seconds)
        seconds = outcome.draft_seconds + outcome.verify_seconds
        for name, value in (
            ("_seconds", seconds),
            ("_tokens", outcome.accepted + 1),
            ("_draft_seconds", outcome.draft_seconds),
            ("_drafted", outcome.drafted),
        ):
            setattr(self, name, getattr(self, name) * _RATE_MEMORY + value)

    @property
    def seconds_per_token(self) -> float:
        return self._seconds / self._tokens

    @property
    def seconds_per_row(self) -> float:
        """That one more drafted token takes."""
        return self._draft_seconds / max(self._drafted, 1.0) + self._verify.slope


# Elder siblings beyond which their number says nothing more.
_RANKS = 4
# Degrees of how likely the drafter finds a token.
_SURE = (0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95, 0.99)
# Tokens that what the drafter says counts for, and the share of it that is believed.
_PRIOR_TOKENS = 4.0
_PRIOR_SHARE = 0.8
# Nothing is surer: behind what is certain not everything may be taken in.
_SUREST = 0.995
# What a round counts for when the next one has been seen.
_MEMORY = 0.99
_RATE_MEMORY = 0.97
# How the least value follows trees that were full, or not.
_HIGHER, _LOWER = 1.05, 0.85
# Rounds of each kind before they are compared, and how often the slower is tried again.
_FIRST_ROUNDS = 4
_TRY_EVERY = 24
