"""How drafts branch: which tokens a tree takes in, and whether a tree or a chain is drafted."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Protocol

from triforce_core.decoding.draft_length import Line
from triforce_core.decoding.trees.tree import Branches


class Grown(Protocol):
    """What growing is learned from: `levels.Round`. branches is None of an empty tree too."""

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
    verifying it takes; a level of a tree costs what drafting it takes, however wide it is. What
    costs more than it is worth is left out.

    Only draft tokens and their distributions decide; for a token that is drawn, nothing that
    depends on the draw does. The output distribution is untouched.
    """

    def __init__(self, nodes: int, deepest: int, *, asked: bool, texts: int = 1) -> None:
        """nodes: tokens of the largest tree; deepest: of its longest path. asked: whether every
        draft shall be one; else one is made where it was measured to be faster than a chain.
        texts: drafts that one pass is over, which are all of one kind as far as that can be
        """
        self.deepest = deepest
        self._nodes = nodes
        self._asked = asked
        self._examined = [[0.0] * (len(_SURE) + 1) for _ in range(_RANKS)]
        self._held = [[0.0] * (len(_SURE) + 1) for _ in range(_RANKS)]
        self._least = 1 / nodes
        self._chain, self._tree = _Rate(), _Rate()
        self._verify = Line()
        self._level_seconds = self._levels = 0.0
        self._tried = self._bore = 0.0
        self._texts = texts
        self._asks = 0
        self._prefers_trees = False

    def choose(self) -> int:
        """Tokens of the next tree at most, 0 to draft a chain."""
        if self._asked:
            return self._nodes
        turn = self._asks // self._texts
        self._asks += 1
        if self._chain.rounds < _FIRST_ROUNDS or self._tree.rounds < _FIRST_ROUNDS:
            tree = self._chain.rounds >= _FIRST_ROUNDS
        else:
            now, other = self._chain, self._tree
            if self._prefers_trees:
                now, other = other, now
            if other.seconds_per_token * _CLEARLY < now.seconds_per_token:
                self._prefers_trees = not self._prefers_trees
            # Now and then the other is tried: the text may have changed.
            tree = self._prefers_trees ^ (turn % _TRY_EVERY >= _TRY_EVERY - _TRIES)
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
        if self._asked or not self._known.rounds:
            return 0.0
        return min(1.0, self._verify.slope / self._known.seconds_per_token)

    @property
    def level_least(self) -> float:
        """The same for who takes in a level at a time, and knows nothing of deeper ones: so much
        that a tree just becomes full.
        """
        return max(self.least, self._least)

    def may_bear(self, value: float) -> bool:
        """Whether any child of a row of some value may be worth its own."""
        return value * _SUREST >= self.level_least

    def is_worth_a_level(self, values: Sequence[float]) -> bool:
        """Whether drafting what follows some rows of a tree gains more than it takes. values: the
        rows'
        """
        if self._asked or not self._levels or not self._known.rounds:
            return True
        bears = (self._bore + _PRIOR_TOKENS * _PRIOR_SHARE) / (self._tried + _PRIOR_TOKENS)
        gain = sum(values) * bears * self._known.seconds_per_token
        return gain > self._level_seconds / self._levels

    def grew(self, nodes: int) -> None:
        """Says how large a tree became that `level_least` has ruled."""
        full = nodes >= self._nodes
        self._least = min(0.5, max(1e-4, self._least * (_HIGHER if full else _LOWER)))

    @property
    def _known(self) -> _Rate:
        """Of trees, or of chains as long as there were none: the first shall not cost too much."""
        return self._tree if self._tree.rounds else self._chain

    def observe(self, outcome: Grown, *, tree: bool) -> None:
        """Learns from a round. tree: whether its draft was to branch, even if nothing was found"""
        if outcome.warm:
            for rate in (self._chain, self._tree):
                # What is not measured counts less and less too, so that a try soon tells.
                rate.fade()
            (self._tree if tree else self._chain).observe(outcome)
            self._verify.observe(outcome.drafted, outcome.verify_seconds)
        if outcome.warm and outcome.drafted:
            # A token of a chain is a level too.
            levels = max(outcome.branches.depths) if outcome.branches else outcome.drafted
            self._level_seconds = self._level_seconds * _RATE_MEMORY + outcome.draft_seconds
            self._levels = self._levels * _RATE_MEMORY + levels
        if outcome.branches is None:
            return
        self._tried = self._tried * _MEMORY + sum(
            bool(outcome.branches.children[row]) for row in outcome.path
        )
        self._bore = self._bore * _MEMORY + outcome.accepted
        for counts in (*self._examined, *self._held):
            counts[:] = [count * _MEMORY for count in counts]
        for row, holds in outcome.branches.examined(outcome.path):
            rank = outcome.branches.children[outcome.branches.parents[row - 1]].index(row)
            kind, degree = min(rank, _RANKS - 1), bisect(_SURE, outcome.confidence[row - 1])
            self._examined[kind][degree] += 1
            self._held[kind][degree] += holds


class _Rate:
    """Seconds of rounds, and the tokens they gave."""

    def __init__(self) -> None:
        self.rounds = 0
        self._seconds = self._tokens = 0.0

    def fade(self) -> None:
        self._seconds *= _RATE_MEMORY
        self._tokens *= _RATE_MEMORY

    def observe(self, outcome: Grown) -> None:
        self.rounds += 1
        self._seconds += outcome.draft_seconds + outcome.verify_seconds
        self._tokens += outcome.accepted + 1

    @property
    def seconds_per_token(self) -> float:
        return self._seconds / self._tokens


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
_RATE_MEMORY = 0.95
# How the least value follows trees that were full, or not.
_HIGHER, _LOWER = 1.05, 0.85
# Rounds of each kind before they are compared; by how much the other must be faster; how often, and
# for how many rounds, the slower is tried again.
_FIRST_ROUNDS = 4
_CLEARLY = 1.05
_TRY_EVERY, _TRIES = 48, 2
