"""How long to draft: fixed, or chosen while running so that seconds per token are least."""

from __future__ import annotations

from typing import Protocol


class Observed(Protocol):
    """What a length is learned from: one round of `levels.speculate`."""

    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float


class DraftLength(Protocol):
    def choose(self, most: int) -> int:
        """How many tokens to propose next, 0 to `most`."""

    def observe(self, turn: Observed) -> None: ...


class Fixed:
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def choose(self, most: int) -> int:
        return min(self._tokens, most)

    def observe(self, turn: Observed) -> None:
        pass


class Auto:
    """Minimises (T_verify(g) + T_draft(g)) / E(g) over the draft length g.

    T_verify is a line in the tokens verified, T_draft one through zero, both fitted to what was
    measured. E(g), the tokens that a round gives, is 1 + the sum over i <= g of the chance that i
    tokens are accepted. With one acceptance a for every position this is
    (1 - a^(g+1)) / (1 - a); here each position's own chance is learned, drawn towards the common
    one as long as little is known of it. Old rounds count for less and less, so a length that lost
    is tried again when the text may have changed.

    As in SpecDec++ (Huang et al., 2024) and SmartSpec (Liu et al., 2024), the length follows the
    acceptance that is observed; no draft's own coins decide, so the output law is untouched.
    """

    def __init__(self, most: int, acceptance: float, first: int) -> None:
        """most: longest length. acceptance: assumed at first. first: length of the first draft."""
        self._most = most
        self._first = first
        self._prior = acceptance
        self._held = [0.0] * most
        self._examined = [0.0] * most
        self._verify = _Line()
        self._draft_seconds = 0.0
        self._draft_tokens = 0.0

    def choose(self, most: int) -> int:
        most = min(most, self._most)
        if not self._verify.known or not self._draft_tokens:
            return min(self._first, most)
        per_draft = self._draft_seconds / self._draft_tokens
        best, least = 0, self._verify.at(0)
        expected = alive = 1.0
        for length, chance in enumerate(self._chances(most), start=1):
            alive *= chance
            expected += alive
            cost = (self._verify.at(length) + per_draft * length) / expected
            if cost < least:
                best, least = length, cost
        return best

    def observe(self, turn: Observed) -> None:
        for counts in (self._held, self._examined):
            for i, count in enumerate(counts):
                counts[i] = count * _MEMORY
        for i in range(min(turn.accepted, self._most)):
            self._held[i] += 1
            self._examined[i] += 1
        if turn.accepted < min(turn.drafted, self._most):
            self._examined[turn.accepted] += 1
        self._verify.observe(turn.drafted, turn.verify_seconds)
        if turn.drafted:
            self._draft_seconds = self._draft_seconds * _MEMORY + turn.draft_seconds
            self._draft_tokens = self._draft_tokens * _MEMORY + turn.drafted

    def _chances(self, most: int) -> list[float]:
        """The chance that each position is accepted if those before it are."""
        common = (sum(self._held) + _PRIOR_WEIGHT * self._prior) / (
            sum(self._examined) + _PRIOR_WEIGHT
        )
        return [
            (held + _POSITION_WEIGHT * common) / (examined + _POSITION_WEIGHT)
            for held, examined in zip(self._held[:most], self._examined[:most], strict=True)
        ]


_MEMORY = 0.97
"""What a round counts for when the next one has been seen: about 30 rounds are remembered."""
_PRIOR_WEIGHT = 4.0
"""Tokens of experience that the assumed acceptance counts for."""
_POSITION_WEIGHT = 20.0
"""The same for the common acceptance against a position's own."""
_LEVEL_WEIGHT = 0.5
"""Rounds of experience for a slope of zero, in tokens squared."""


class _Line:
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

    def at(self, tokens: float) -> float:
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        slope = max(0.0, (self._xy / self._n - x * y) / (spread + _LEVEL_WEIGHT / self._n))
        return max(y + slope * (tokens - x), y * _LEAST_SHARE)


_LEAST_SHARE = 0.05
