"""How long to draft: fixed, or chosen while running so that seconds per token are least."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Observed(Protocol):
    """What a length is learned from: one round of `levels.speculate`."""

    drafted: int
    accepted: int
    confidence: Sequence[float]
    draft_seconds: float
    verify_seconds: float
    warm: bool


@dataclass
class Ledger:
    """Rounds with a draft of one level beside plain decoding, over all requests.

    drafts: how many are counted: of rounds that were warm, once one without a draft is known
    seconds: that they took; plain_seconds: that their tokens would have taken without drafts
    idle: passes since drafts last had a gain to show at whose end none was worth its seconds
    """

    drafts: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    idle: int = 0

    def count(self, outcome: Observed, plain_seconds: float) -> None:
        """plain_seconds: of a round without a draft."""
        self.drafts += 1
        self.seconds += outcome.draft_seconds + outcome.verify_seconds
        self.plain_seconds += (outcome.accepted + 1) * plain_seconds

    @property
    def has_paid(self) -> bool:
        return self.plain_seconds >= LEAST_GAIN * self.seconds

    @property
    def is_lost(self) -> bool:
        """Whether drafts never gained anything to speak of, and are not expected to do better."""
        return self.drafts >= _LEAST_DRAFTS and self.idle >= _IDLE_PASSES


class DraftLength(Protocol):
    ledger: Ledger

    def choose(self, most: int) -> int:
        """How many tokens to propose next at most, 0 to `most`."""

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """Whether to draft one more token after some whose distributions peak at `confidence`."""

    def observe(self, outcome: Observed) -> None: ...

    def count(self, outcome: Observed) -> None:
        """Counts a round whose draft had no such length, for `ledger` alone."""

    def end_pass(self) -> None:
        """A pass of the target has ended: `ledger.idle` counts those in which drafts do not pay."""


class Fixed:
    def __init__(self, tokens: int) -> None:
        self.ledger = Ledger()
        self._tokens = tokens

    def choose(self, most: int) -> int:
        return min(self._tokens, most)

    def goes_on(self, confidence: Sequence[float]) -> bool:
        return True

    def observe(self, outcome: Observed) -> None:
        pass

    def count(self, outcome: Observed) -> None:
        pass

    def end_pass(self) -> None:
        pass


class Auto:
    """Minimises (T_verify(g) + T_draft(g)) / E(g) over the draft length g.

    T_verify is a line in the tokens verified, T_draft one through zero, both fitted to what was
    measured. E(g), the tokens that a round gives, is 1 + the sum over i <= g of the chance that i
    tokens are accepted. With one acceptance a for every position this is
    (1 - a^(g+1)) / (1 - a); here each position's own chance is learned, drawn towards the common
    one as long as little is known of it. Old rounds count for less and less, so a length that lost
    is tried again when the text may have changed.

    A proposer that says how sure it is of each token can do better than one length for all drafts:
    it goes on while the chance that the next token is reached and accepted, times the seconds that
    a token costs, exceeds the seconds that drafting it takes. The chance of a token is learned for
    each degree of confidence. That is the threshold rule of SpecDec++ (Huang et al., 2024), with
    SmartSpec's goodput (Liu et al., 2024) as what it maximises.

    A round in which a kernel was compiled or a graph recorded teaches what was accepted, not how
    long that takes.

    Drafts that would gain less than a tenth are not made: text would come in bursts for nothing. A
    level never pays if its `ledger` is lost: what drafts took was never made up for, and none
    has been worth its seconds for many passes.

    Only draft tokens and their distributions decide, never the verifier's random numbers: the
    output distribution is untouched.
    """

    def __init__(
        self,
        most: int,
        acceptance: float,
        first: int,
        *,
        by_confidence: bool = False,
        plain_first: bool = False,
    ) -> None:
        """most: longest length. acceptance: assumed at first. first: length of the first draft.

        plain_first: whether the first round goes without a draft, so that it is known what drafts
            have to beat; a round that is worth many others is not spent on that
        """
        self.ledger = Ledger()
        self._most = most
        self._first = first
        self._prior = acceptance
        self._by_confidence = by_confidence
        self._plain_first = plain_first
        # As if a few rounds had been seen, which fade like any other.
        reached = [_PRIOR_ROUNDS * acceptance**i for i in range(most + 1)]
        self._examined, self._held = reached[:-1], reached[1:]
        self._sure_examined = [0.0] * (len(_CONFIDENCE) + 1)
        self._sure_held = [0.0] * (len(_CONFIDENCE) + 1)
        self._verify = Line()
        self._draft_seconds = 0.0
        self._draft_tokens = 0.0
        self._seconds_per_token = 0.0
        self._plain_known = False
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
            cost = (self._verify.at(length) + self._per_draft * length) / expected
            if cost < least:
                best, least = length, cost
        self._seconds_per_token = least
        if most and least * LEAST_GAIN > self._verify.at(0):
            # Now and then a single token is tried: the text may have changed.
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
        self._plain_known |= not outcome.drafted
        if outcome.drafted:
            self.count(outcome)
            self._draft_seconds = self._draft_seconds * _MEMORY + outcome.draft_seconds
            self._draft_tokens = self._draft_tokens * _MEMORY + outcome.drafted

    def count(self, outcome: Observed) -> None:
        """DraftLength.count."""
        if outcome.warm and self._plain_known:
            self.ledger.count(outcome, self._verify.at(0))

    def end_pass(self) -> None:
        """DraftLength.end_pass."""
        if self.ledger.has_paid and self.ledger.drafts:
            self.ledger.idle = 0
        elif self._idle_rounds:
            self.ledger.idle += 1

    @property
    def _known(self) -> bool:
        return self._verify.known and self._draft_tokens > 0

    @property
    def _per_draft(self) -> float:
        return self._draft_seconds / self._draft_tokens

    @property
    def _common(self) -> float:
        return (sum(self._held) + _PRIOR_WEIGHT * self._prior) / (
            sum(self._examined) + _PRIOR_WEIGHT
        )

    def _chances(self) -> list[float]:
        """The chance that each position is accepted if those before it are."""
        common = self._common
        return [
            (held + _POSITION_WEIGHT * common) / (examined + _POSITION_WEIGHT)
            for held, examined in zip(self._held, self._examined, strict=True)
        ]


# How much faster drafts must make decoding to be worth the wait for a whole draft.
LEAST_GAIN = 1.1
# Rounds in which drafts do not pay after which one token is drafted nevertheless.
_TRY_EVERY = 48
# A level that gained nothing is given up after so many passes in which drafts do not pay, if it was
# tried so often.
_IDLE_PASSES = 128
_LEAST_DRAFTS = 3
# What a round counts for when the next one has been seen: about 30 rounds are remembered.
_MEMORY = 0.97
# Rounds that the assumed acceptance counts for at first, and tokens that it counts for always.
_PRIOR_ROUNDS = 2.0
_PRIOR_WEIGHT = 2.0
# Degrees of confidence: the greatest probability of a distribution.
_CONFIDENCE = (0.5, 0.7, 0.85, 0.95, 0.999)
# Tokens that the common acceptance counts for against a degree's own, and against a position's.
_CONFIDENCE_WEIGHT = 8.0
_POSITION_WEIGHT = 20.0
# This keeps a slope near zero while little is known of it, in tokens squared.
_LEVEL_WEIGHT = 0.5
# No length may seem to take less than this share of the mean seconds.
_LEAST_SHARE = 0.05


class Line:
    """Seconds as a line in tokens, by least squares over rounds that fade; slope 0 or more."""

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
