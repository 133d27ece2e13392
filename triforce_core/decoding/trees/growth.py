"""Growth of tree drafts: which tokens a tree includes, and whether to draft a tree or a chain."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from triforce_core.decoding.draft_length import Line
from triforce_core.decoding.trees.tree import Branches


class Grown(Protocol):
    """The measurements that growth is learned from: `levels.Round`.

    branches: None for a chain and for an empty tree
    """

    branches: Branches | None
    path: Sequence[int]
    confidence: Sequence[float]
    accepted: int
    drafted: int
    draft_seconds: float
    verify_seconds: float
    warm: bool


# The probability that a child is accepted if its elder siblings are rejected, by their number and
# by the drafter's probability of the child, renormalised without them.
Prior = Callable[[int, float], float]


def by_probability(rank: int, sure: float) -> float:
    """The prior of a small drafter, whose probabilities are believed in part."""
    return _PRIOR_SHARE * sure


def of_retrieval_level(rank: int, sure: float) -> float:
    """The prior of the retrieval level, whose distributions are near those of the target.

    sure: greatest probability of the distribution for a first child
    """
    return by_probability(rank, sure) if rank else 1 - _DOUBT * (1 - sure)


class Growth:
    """A learned estimate of how likely draft tokens are accepted, and which are worth a row.

    The value of a token is the probability that it is reached and accepted: the value of its
    parent, times the probability that its elder siblings are rejected, times its own chance. A tree
    includes the tokens of the greatest values, as in Sequoia (Chen et al., 2024); the chances are
    estimated from the drafter's probabilities, as in EAGLE-2 (Li et al., 2024). Each token adds its
    value to the tokens that a pass yields, and costs the time to verify it. A level of a tree costs
    the time to draft it, whatever its width. A token or level that costs more than it yields is
    left out.

    These decisions depend on draft tokens and their distributions alone. Whether a drawn token is
    included does not depend on the draw. So the output distribution is unchanged.
    """

    def __init__(
        self,
        nodes: int,
        deepest: int,
        *,
        asked: bool,
        texts: int = 1,
        prior: Prior = by_probability,
        chains: bool = True,
        at_once: bool = False,
    ) -> None:
        """nodes: number of tokens of the largest tree
        deepest: number of tokens of its longest path
        asked: whether the size of a tree is given; otherwise a token must be worth its time
        texts: number of sequences in a pass; as far as possible, all of them draft the same kind
        prior: chances that are assumed before any are learned
        chains: whether a chain is drafted where it was measured to be faster, unless `asked`
        at_once: whether the drafter predicts all levels at once: a further one costs nothing
        """
        self.deepest = deepest
        self._nodes = nodes
        self._asked = asked
        self._prior = prior
        self._compares = chains and not asked
        self._examined = [[0.0] * (len(_SURE) + 1) for _ in range(_RANKS)]
        self._held = [[0.0] * (len(_SURE) + 1) for _ in range(_RANKS)]
        self._least = 1 / nodes
        self._chain, self._tree = _Rate(), _Rate()
        self._verify = Line()
        self._level_seconds = self._levels = 0.0
        self._tried = self._bore = 0.0
        self._texts = texts
        self._at_once = at_once
        self._asks = 0
        self._prefers_trees = False

    def choose(self) -> int:
        """Return the most tokens of the next tree, or 0 to draft a chain."""
        if not self._compares:
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
            # Try the other kind now and then: the text may have changed.
            tree = self._prefers_trees ^ (turn % _TRY_EVERY >= _TRY_EVERY - _TRIES)
        return self._nodes if tree else 0

    def chance(self, rank: int, sure: float) -> float:
        """Return the probability that a child is accepted if its elder siblings are rejected.

        rank: number of elder siblings
        sure: the drafter's probability of the child, renormalised without its elder siblings
        """
        kind, degree = min(rank, _RANKS - 1), bisect(_SURE, sure)
        held = self._held[kind][degree] + _PRIOR_TOKENS * self._prior(rank, sure)
        return min(held / (self._examined[kind][degree] + _PRIOR_TOKENS), _SUREST)

    @property
    def least(self) -> float:
        """The least value at which a token is worth its row, if there is room."""
        if self._asked or not self._known.rounds:
            return 0.0
        return min(1.0, self._verify.slope / self._known.seconds_per_token)

    @property
    def seconds_per_token(self) -> float | None:
        """Measured seconds of a round for each token that it yields; infinite if a tree's size is
        given, whatever it costs, and None if nothing was measured.
        """
        if self._asked:
            return inf
        return self._known.seconds_per_token if self._known.rounds else None

    @property
    def level_least(self) -> float:
        """The threshold for growing the tree level by level, without knowledge of deeper levels. It
        is adjusted so that a tree just becomes full.
        """
        return max(self.least, self._least)

    def may_bear(self, value: float) -> bool:
        """Whether a row of this value may have a child that is worth a row."""
        return value * _SUREST >= self.level_least

    def is_worth_a_level(self, values: Sequence[float]) -> bool:
        """Whether drafting the next level gains more time than it takes.

        values: the values of the rows that the level would follow
        """
        if self._asked or self._at_once or not self._levels or not self._known.rounds:
            return True
        gain = sum(values) * self.bears * self._known.seconds_per_token
        return gain > self._level_seconds / self._levels

    @property
    def bears(self) -> float:
        """The probability that a child of an accepted row is accepted, if it has any."""
        return (self._bore + _PRIOR_TOKENS * _PRIOR_SHARE) / (self._tried + _PRIOR_TOKENS)

    def grew(self, nodes: int) -> None:
        """Adjust `level_least` to the size of a tree that was grown with it."""
        full = nodes >= self._nodes
        self._least = min(0.5, max(1e-4, self._least * (_HIGHER if full else _LOWER)))

    @property
    def _known(self) -> _Rate:
        """The rate of trees; before the first tree that of chains, to limit the tree's cost."""
        return self._tree if self._tree.rounds else self._chain

    def observe(self, outcome: Grown, *, tree: bool) -> None:
        """Learn from a round. tree: whether its draft was meant to be a tree, even an empty one"""
        if outcome.warm:
            for rate in (self._chain, self._tree):
                # The kind that is not measured fades too, so that a single try has an effect.
                rate.fade()
            (self._tree if tree else self._chain).observe(outcome)
            self._verify.observe(outcome.drafted, outcome.verify_seconds)
        if outcome.warm and outcome.drafted:
            # Each token of a chain counts as a level.
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
    """Seconds of rounds, and the tokens that they yielded."""

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


# Ranks of children that are told apart; higher ranks count as the last.
_RANKS = 4
# Bounds of the degrees of the drafter's probability.
_SURE = (0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95, 0.99)
# Weight of the drafter's probability as a prior, in tokens, and the share of it that is believed.
_PRIOR_TOKENS = 4.0
_PRIOR_SHARE = 0.8
# Probability that the target rejects a token of the retrieval level whose distribution is flat.
_DOUBT = 0.12
# Upper limit of a chance, so that the values of a path decrease.
_SUREST = 0.995
# Factor by which the weight of a round shrinks each round.
_MEMORY = 0.99
_RATE_MEMORY = 0.95
# Factors by which the threshold changes after a full tree, and after one that was not full.
_HIGHER, _LOWER = 1.05, 0.85
# Rounds of each kind before they are compared; factor by which the other must be faster; period of
# tries of the slower kind, and rounds of each try.
_FIRST_ROUNDS = 4
_CLEARLY = 1.05
_TRY_EVERY, _TRIES = 48, 2
