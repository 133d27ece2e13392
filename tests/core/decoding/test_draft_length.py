"""Draft lengths: `auto` finds the best fixed one on simulated levels, and follows changes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from triforce_core.decoding.draft_length import Auto, Fixed


@dataclass
class Outcome:
    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float
    confidence: list[float]
    warm: bool = True


class World:
    """A level whose tokens are accepted with chances that its confidence tells in part."""

    def __init__(
        self,
        verify: float,
        each: float,
        draft: float,
        sure: float,
        unsure: float,
        at_once: bool = False,
    ):
        """at_once: whether a draft takes `draft` seconds, and not each of its tokens"""
        self.verify, self.each, self.draft, self.at_once = verify, each, draft, at_once
        self.chances = {0.99: sure, 0.6: unsure}
        self.coins = random.Random(0)
        self.seconds = self.tokens = 0.0

    def round(self, length, confident: bool, most: int = 64) -> Outcome:
        count = length.choose(most)
        tokens: list[float] = []
        while len(tokens) < count and (not tokens or not confident or length.goes_on(tokens)):
            tokens.append(0.99 if self.coins.random() < 0.7 else 0.6)
        accepted = 0
        while accepted < len(tokens) and self.coins.random() < self.chances[tokens[accepted]]:
            accepted += 1
        verify = self.verify + self.each * len(tokens)
        drafting = self.draft * (min(1, len(tokens)) if self.at_once else len(tokens))
        outcome = Outcome(len(tokens), accepted, drafting, verify, tokens if confident else [])
        length.observe(outcome)
        self.seconds += outcome.draft_seconds + verify
        self.tokens += accepted + 1
        return outcome

    def cost(self, length, rounds: int, confident: bool = False) -> float:
        self.seconds = self.tokens = 0.0
        for _ in range(rounds):
            self.round(length, confident)
        return self.seconds / self.tokens


WORLDS = {
    "slow link": (100.0, 0.0, 1.0, 0.98, 0.85),
    "very slow link": (300.0, 0.1, 1.0, 0.99, 0.95),
    "bad drafts": (30.0, 0.0, 1.0, 0.6, 0.3),
    "costly tokens": (10.0, 1.0, 1.0, 0.95, 0.8),
    "drafting does not pay": (1.0, 0.8, 1.0, 0.7, 0.4),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_auto_is_near_the_best_fixed_length(world: str, confident: bool) -> None:
    fixed = min(
        World(*WORLDS[world]).cost(Fixed(n), 4000) for n in (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    )
    auto = World(*WORLDS[world]).cost(Auto(64, 0.9, 16, by_confidence=confident), 4000, confident)
    assert auto < 1.05 * fixed


@pytest.mark.parametrize(
    "world",
    [
        (20.0, 0.0, 6.0, 0.9, 0.7),
        (10.0, 1.0, 6.0, 0.95, 0.8),
        (10.0, 0.2, 3.0, 0.6, 0.3),
        (2.0, 0.6, 4.0, 0.7, 0.4),
    ],
)
def test_of_a_draft_that_is_predicted_at_once_no_token_is_counted(world: tuple) -> None:
    """A learned length is near the best one, and no shorter draft seems cheaper."""
    fixed = min(World(*world, at_once=True).cost(Fixed(n), 4000) for n in range(8))
    auto = World(*world, at_once=True).cost(Auto(7, 0.6, 4, at_once=True), 4000)
    assert auto < 1.05 * fixed


def test_confidence_that_tells_beats_any_fixed_length() -> None:
    world = (40.0, 0.0, 1.0, 0.995, 0.5)
    fixed = min(World(*world).cost(Fixed(n), 4000) for n in range(1, 33))
    auto = World(*world).cost(Auto(64, 0.9, 16, by_confidence=True), 4000, confident=True)
    assert auto < 0.99 * fixed


def test_auto_follows_a_text_that_changes() -> None:
    world, length = World(100.0, 0.0, 1.0, 0.3, 0.3), Auto(64, 0.9, 16)
    world.cost(length, 200)
    assert length.choose(64) <= 6
    world.chances = dict.fromkeys(world.chances, 0.98)
    world.cost(length, 200)
    assert length.choose(64) >= 30


def test_a_level_that_was_given_up_is_tried_again() -> None:
    world, length = World(1.0, 0.3, 0.1, 0.05, 0.05), Auto(16, 0.6, 4)
    world.cost(length, 100)
    assert length.choose(16) == 0
    drafted = [world.round(length, confident=False).drafted for _ in range(400)]
    assert 0 < sum(n > 0 for n in drafted) < 100


def test_a_round_that_compiled_or_recorded_teaches_no_seconds() -> None:
    """One such round may take a thousand times as long; what it accepted still counts."""
    disturbed, calm = Auto(64, 0.9, 16), Auto(64, 0.9, 16)
    for _ in range(3):
        usual = Outcome(12, 9, 12.0, 30.0, [])
        disturbed.observe(replace(usual, draft_seconds=9e3, verify_seconds=9e4, warm=False))
        calm.observe(usual)
    assert disturbed.choose(64) == 16, "without a warm round the first length stays"
    for _ in range(3):
        for length in (disturbed, calm):
            length.observe(usual)
    assert disturbed.choose(64) == calm.choose(64)


def test_lengths_stay_below_what_may_be_said() -> None:
    for length in (Fixed(5), Auto(64, 0.9, 16)):
        for most in (0, 1, 3, 5, 64):
            assert 0 <= length.choose(most) <= most
