"""L1: whatever was drafted, what comes out has exactly the target's law."""

from __future__ import annotations

import os

import pytest
import torch
from law_tests import LEAST_P, configuration, emitted, p_value, random_law

from triforce_core.decoding.acceptance import Coupled, Draft, Optimal, accept, exponential_noise
from triforce_core.decoding.distributions import draw

DRAWS = int(os.environ.get("TRIFORCE_DRAWS", 50_000))


@pytest.mark.parametrize("seed", range(50))
def test_what_comes_out_has_the_target_law(seed: int) -> None:
    draft, target = configuration(seed)
    counts = emitted(draft, target, DRAWS, torch.Generator().manual_seed(1000 + seed))
    assert counts[0].sum() == DRAWS
    for i in range(len(counts)):
        assert p_value(counts[i : i + 1], target[i : i + 1]) > LEAST_P, i


def test_total_variation_is_small() -> None:
    generator = torch.Generator().manual_seed(0)
    draft = random_law(16, "full", generator).unsqueeze(0)
    target = torch.stack([random_law(16, "full", generator) for _ in range(2)])
    counts = emitted(draft, target, 200_000, generator)
    assert (counts[0] / counts[0].sum() - target[0]).abs().sum() / 2 < 0.006


def test_acceptance_is_one_minus_total_variation() -> None:
    generator = torch.Generator().manual_seed(3)
    q, p = (random_law(16, "full", generator) for _ in range(2))
    trials = 100_000
    proposed = draw(q.expand(trials, 16), generator).unsqueeze(1)
    verdict = accept(proposed, q.expand(trials, 1, 16), p.expand(trials, 2, 16), generator)
    expected = torch.minimum(p, q).sum()
    assert abs(verdict.accepted.double().mean() - expected) < 5 * 0.5 / trials**0.5


def test_equal_laws_accept_everything_and_one_hot_laws_decide_alone() -> None:
    generator = torch.Generator().manual_seed(4)
    p = torch.stack([random_law(8, "full", generator) for _ in range(6)])
    tokens = draw(p[:5], generator)
    for _ in range(200):
        assert accept(tokens, p[:5], p, generator).accepted == 5
    target = torch.eye(8)[[1, 2, 3, 4]]
    verdict = accept(torch.tensor([1, 2, 5]), torch.eye(8)[[1, 2, 5]], target, generator)
    assert (int(verdict.accepted), int(verdict.token)) == (2, 3)
    verdict = accept(torch.tensor([1, 2, 3]), torch.eye(8)[[1, 2, 3]], target, generator)
    assert (int(verdict.accepted), int(verdict.token)) == (3, 4)


def test_an_empty_draft_is_a_plain_draw() -> None:
    p = torch.eye(8)[[5]]
    for rule in (Optimal(torch.Generator()), Coupled(0)):
        empty = Draft(torch.empty(0, dtype=torch.int64))
        verdict = rule.accept(empty, p, 7)
        assert (int(verdict.accepted), int(verdict.token)) == (0, 5)


def test_laws_that_differ_by_rounding_never_draw_the_impossible() -> None:
    """The residual of nearly equal laws may be nothing at all; p takes its place."""
    p = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    q = torch.tensor([[0.25, 0.75000006, 0.0]])

    class Unlucky:
        pass

    original = torch.rand
    try:
        torch.rand = lambda size, **_: torch.ones(size, dtype=torch.float64)
        verdict = accept(torch.tensor([1]), q, p, None)
    finally:
        torch.rand = original
    assert int(verdict.accepted) == 0
    assert int(verdict.token) in (0, 1)


def test_a_law_that_is_no_number_is_seen() -> None:
    draft = Draft(torch.tensor([1]), torch.eye(4)[[1]])
    bad = torch.full((2, 4), float("nan"))
    for rule in (Optimal(torch.Generator()), Coupled(0)):
        verdict = rule.accept(draft, bad, 0)
        assert int(verdict.token) == -1
        assert rule.draw(bad, 0).tolist() == [-1, -1]


@pytest.mark.first
@pytest.mark.parametrize("vocab", [32, 8, 2])
def test_coupled_draws_follow_the_law_over_positions_and_over_seeds(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    p = random_law(vocab, "zeros" if vocab > 2 else "full", generator)
    positions = Coupled(11).draw(p.expand(40_000, vocab), 0)
    seeds = torch.cat([Coupled(seed).draw(p.expand(1, vocab), 5) for seed in range(20_000)])
    for drawn in (positions, seeds):
        assert p_value(drawn.bincount(minlength=vocab).unsqueeze(0), p.unsqueeze(0)) > LEAST_P


def test_coupled_acceptance_reaches_its_bound_and_keeps_the_law() -> None:
    generator = torch.Generator().manual_seed(9)
    q, p = (random_law(16, "full", generator) for _ in range(2))
    rows = 40_000
    own, drafted = (Coupled(1).draw(law.expand(rows, 16), 0) for law in (p, q))
    distance = float((p - q).abs().sum() / 2)
    agreed = float((own == drafted).double().mean())
    assert agreed > (1 - distance) / (1 + distance) - 5 * 0.5 / rows**0.5
    assert agreed < 1 - distance + 5 * 0.5 / rows**0.5
    draft = Draft(drafted[:6], q.expand(6, 16))
    verdict = Coupled(1).accept(draft, p.expand(7, 16), 0)
    same = (own[:6] == drafted[:6]).long().cumprod(0).sum()
    assert int(verdict.accepted) == int(same)
    assert int(verdict.token) == int(own[int(same)])


def test_noise_depends_on_seed_and_position_alone() -> None:
    places = torch.arange(100, 150)
    whole = exponential_noise(5, places, 64)
    part = exponential_noise(5, places[20:23], 64)
    assert torch.equal(whole[20:23], part)
    assert (whole > 0).all()
    others = (exponential_noise(6, places, 64), whole.roll(1, 0))
    for other in others:
        assert (whole == other).sum() == 0
        correlation = torch.corrcoef(torch.stack((whole.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 5 / whole.numel() ** 0.5
    large = exponential_noise(2**63 - 1, torch.arange(100), 1000)
    assert abs(float(large.mean()) - 1) < 5 / large.numel() ** 0.5
