"""Draft lengths: fixed, or chosen at run time to minimise the seconds per token."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Protocol


class Observed(Protocol):
    """The measurements that a length is learned from: one round of `levels.speculate`."""

    drafted: int
    accepted: int
    confidence: Sequence[float]
    draft_seconds: float
    verify_seconds: float
    warm: bool


class DraftLength(Protocol):
    def choose(self, most: int) -> int:
        """Return the most tokens to propose next, 0 to `most`."""

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """Whether to draft one more token.

        confidence: greatest probability of the distribution of each token drafted so far
        """

    def observe(self, outcome: Observed) -> None: ...


class Fixed:
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def choose(self, most: int) -> int:
        return min(self._tokens, most)

    def goes_on(self, confidence: Sequence[float]) -> bool:
        return True

    def observe(self, outcome: Observed) -> None:
        pass


class Auto:
    """A length that minimises (T_verify(g) + T_draft(g)) / E(g) over the draft length g.

    T_verify is linear in the number of verified tokens; T_draft is proportional to g, or the same
    for every g if a drafter predicts all tokens at once. Both are fitted to measurements. E(g), the
    expected tokens of a round, is 1 + the sum over i <= g of the probability that i tokens are
    accepted. With one acceptance rate a for every position this is (1 - a^(g+1)) / (1 - a). Here
    each position has its own learned rate, which is shrunk towards the common rate while the
    position has few observations. Old rounds fade, so a length that lost is tried again when the
    text may have changed.

    If the proposer reports its confidence in each token, a length for each draft beats one length
    for all: drafting goes on while the probability that the next token is reached and accepted,
    times the seconds per token, exceeds the seconds that drafting the token takes. This probability
    is learned for each degree of confidence. It is the threshold rule of SpecDec++ (Huang et al.,
    2024), and it maximises SmartSpec's goodput (Liu et al., 2024).

    Rounds in which a kernel was compiled or a graph recorded update the acceptance rates, but not
    the times.

    A draft is not made if it would gain less than a tenth: text would arrive in bursts for nothing.

    The length depends on draft tokens and their distributions, never on the verifier's random
    numbers, so the output distribution is unchanged.
    """

    def __init__(
        self,
        most: int,
        acceptance: float,
        first: int,
        *,
        by_confidence: bool = False,
        plain_first: bool = False,
        at_once: bool = False,
    ) -> None:
        """most: the longest length
        acceptance: acceptance rate assumed at first
        first: length of the first draft
        by_confidence: whether the proposer reports its confidence
        plain_first: whether the first round has no draft, to measure the time that drafts have to
            beat; False if a pass is too slow to be spent on this
        at_once: whether a draft takes the same time whatever its length
        """
        self._most = most
        self._first = first
        self._prior = acceptance
        self._by_confidence = by_confidence
        self._plain_first = plain_first
        self._at_once = at_once
        # Start as if a few rounds had been observed; they fade like any other.
        reached = [_PRIOR_ROUNDS * acceptance**i for i in range(most + 1)]
        self._examined, self._held = reached[:-1], reached[1:]
        self._sure_examined = [0.0] * (len(_CONFIDENCE) + 1)
        self._sure_held = [0.0] * (len(_CONFIDENCE) + 1)
        self._verify = Line()
        self._draft_seconds = 0.0
        # Number of tokens drafted in these seconds; of drafts, if all take equally long.
        self._drafted = 0.0
        self._seconds_per_token = 0.0
        self._idle_rounds = 0

    def choose(self, most: int) -> int:
        most = min(most, self._most)
        if not self._known:
            plain = self._plain_first and not self._verify.known
            return 0 if plain else min(self._first, most)
        best, least = 0, self._verify.at(0)
        expected = alive = 1.0
        for length, chance in enumerate(self._chances(), start=1):
            alive *= chance
            expected += alive
            drafting = self._per_draft * (1 if self._at_once else length)
            cost = (self._verify.at(length) + drafting) / expected
            if cost < least:
                best, least = length, cost
        self._seconds_per_token = least
        if most and least * LEAST_GAIN > self._verify.at(0):
            # Try a single token now and then: the text may have changed.
            self._idle_rounds += 1
            return int(self._idle_rounds % _TRY_EVERY == 0)
        self._idle_rounds = 0
        return most if best and self._by_confidence else min(best, most)

    def goes_on(self, confidence: Sequence[float]) -> bool:
        if not self._by_confidence or not self._known:
            return True
        common = self._common
        alive = common
        for sure in confidence:
            which = bisect(_CONFIDENCE, sure)
            alive *= (self._sure_held[which] + _CONFIDENCE_WEIGHT * common) / (
                self._sure_examined[which] + _CONFIDENCE_WEIGHT
            )
        return alive * self._seconds_per_token > self._per_draft + self._verify.slope

    def observe(self, outcome: Observed) -> None:
        for counts in (self._held, self._examined, self._sure_held, self._sure_examined):
            counts[:] = [count * _MEMORY for count in counts]
        examined = min(outcome.accepted + 1, outcome.drafted)
        for i in range(min(examined, self._most)):
            self._examined[i] += 1
            self._held[i] += i < outcome.accepted
        for i, sure in enumerate(outcome.confidence[:examined]):
            which = bisect(_CONFIDENCE, sure)
            self._sure_examined[which] += 1
            self._sure_held[which] += i < outcome.accepted
        if not outcome.warm:
            return
        self._verify.observe(outcome.drafted, outcome.verify_seconds)
        if outcome.drafted:
            self._draft_seconds = self._draft_seconds * _MEMORY + outcome.draft_seconds
            drafted = 1 if self._at_once else outcome.drafted
            self._drafted = self._drafted * _MEMORY + drafted

    @property
    def _known(self) -> bool:
        return self._verify.known and self._drafted > 0

    @property
    def _per_draft(self) -> float:
        return self._draft_seconds / self._drafted

    @property
    def _common(self) -> float:
        return (sum(self._held) + _PRIOR_WEIGHT * self._prior) / (
            sum(self._examined) + _PRIOR_WEIGHT
        )

    def _chances(self) -> list[float]:
        """Return the probability that each position is accepted if those before it are."""
        common = self._common
        return [
            (held + _POSITION_WEIGHT * common) / (examined + _POSITION_WEIGHT)
            for held, examined in zip(self._held, self._examined, strict=True)
        ]


# Least speed-up by drafts that is worth the wait for a whole draft.
LEAST_GAIN = 1.1
# While drafts do not pay, one token is drafted every so many rounds.
_TRY_EVERY = 48
# Factor by which a round's weight shrinks each round: about 30 rounds are remembered.
_MEMORY = 0.97
# Weight of the assumed acceptance: in rounds, at the start, and in tokens, always.
_PRIOR_ROUNDS = 2.0
_PRIOR_WEIGHT = 2.0
# Degrees of confidence: the greatest probability of a distribution.
_CONFIDENCE = (0.5, 0.7, 0.85, 0.95, 0.999)
# Weight of the common acceptance, in tokens, against that of a degree and that of a position.
_CONFIDENCE_WEIGHT = 8.0
_POSITION_WEIGHT = 20.0
# Keeps the slope near zero while there are few observations, in tokens squared.
_LEVEL_WEIGHT = 0.5
# No length is predicted to take less than this share of the mean seconds.
_LEAST_SHARE = 0.05


class Line:
    """Seconds as a linear function of tokens: least squares over fading rounds, slope >= 0."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._n > 0

    def observe(self, tokens: int, seconds: float) -> None:
        for name, value in (
            ("_n", 1.0),
            ("_x", tokens),
            ("_y", seconds),
            ("_xx", tokens * tokens),
            ("_xy", tokens * seconds),
        ):
            setattr(self, name, getattr(self, name) * _MEMORY + value)

    @property
    def slope(self) -> float:
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        return max(0.0, (self._xy / self._n - x * y) / (spread + _LEVEL_WEIGHT / self._n))

    def at(self, tokens: float) -> float:
        x, y = self._x / self._n, self._y / self._n
        return max(y + self.slope * (tokens - x), y * _LEAST_SHARE)
