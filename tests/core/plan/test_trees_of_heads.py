"""Trees that a head drafts for the full model, in plans."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from triforce_core.model.checkpoints.drafters.eagle3 import typical_eagle3
from triforce_core.model.known.shapes import read_model
from triforce_core.plan.simulation.acceptance_curve import (
    HEAD_ACCEPTANCE,
    SIBLING_ACCEPTANCE,
    AcceptanceCurve,
    expected_tokens,
    expected_tree,
    first_child_acceptance,
    sibling_acceptance,
)
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.search import TREES, choose
from triforce_core.settings import AUTO, OFF, MethodSettings
from triforce_offload.machine.profiles import named


def case(**settings: object) -> Case:
    model = read_model("llama3.1-70b:Q4_K_M")
    return Case(
        model.config,
        named("rtx4090"),
        8192,
        curve=AcceptanceCurve(inner=HEAD_ACCEPTANCE),
        draft="eagle3",
        draft_config=typical_eagle3(model.config),
        pieces=model.pieces,
        method=MethodSettings(**settings),
    )


def test_a_pass_that_waits_for_the_link_checks_a_tree() -> None:
    tree, chain = choose(case()), choose(case(tree=OFF))
    assert tree.plan.method.draft_tokens == AUTO
    assert tree.plan.budget == chain.plan.budget == 0
    assert tree.round.tokens - 1 in TREES
    assert tree.tokens_per_pass > 1.3 * chain.tokens_per_pass
    assert tree.seconds_per_token < 0.75 * chain.seconds_per_token
    # The engine makes room for the same rows.
    assert tree.memory.requirements.max_draft_tokens == max(TREES)


def test_drafts_of_a_given_length_are_chains() -> None:
    fixed = replace(case(draft_tokens=4), fixed={"draft_tokens": 4})
    found = choose(fixed)
    assert found.round.tokens == 5
    assert found.tokens_per_pass == pytest.approx(expected_tokens(HEAD_ACCEPTANCE, 4))
    plain = choose(replace(case(), fixed={"method": "autoregressive"}))
    assert plain.tokens_per_pass == 1


@pytest.mark.parametrize(("deepest", "published"), [(5, 4.68), (8, 5.39)])
def test_trees_yield_about_what_is_published(deepest: int, published: float) -> None:
    """By an EAGLE-3 head, in trees whose size is not stated: 64 tokens are assumed."""
    assert expected_tree(HEAD_ACCEPTANCE, 64, deepest) == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(("nodes", "deepest"), [(1, 1), (5, 3), (12, 4)])
def test_trees_yield_what_independent_coins_do(nodes: int, deepest: int) -> None:
    """Children are tried in turns, in the best tree of all with these chances."""
    generator = random.Random(nodes)
    chances = (HEAD_ACCEPTANCE, *[SIBLING_ACCEPTANCE] * 4)

    def grown() -> dict[tuple[int, ...], float]:
        """The likeliest paths, each by the rank of every child on it."""
        values: dict[tuple[int, ...], float] = {(): 1.0}
        open_paths: dict[tuple[int, ...], float] = {(0,): chances[0]}
        for _ in range(nodes):
            path = max(open_paths, key=open_paths.__getitem__)
            values[path] = open_paths.pop(path)
            if len(path) < deepest:
                open_paths[*path, 0] = values[path] * chances[0]
            if (rank := path[-1] + 1) < len(chances):
                missed = values[path] / chances[path[-1]] * (1 - chances[path[-1]])
                open_paths[*path[:-1], rank] = missed * chances[rank]
        return values

    def tokens(tree: dict[tuple[int, ...], float]) -> int:
        path: tuple[int, ...] = ()
        while True:
            rank = next(
                (
                    rank
                    for rank, chance in enumerate(chances)
                    if (*path, rank) in tree and generator.random() < chance
                ),
                None,
            )
            if rank is None:
                return len(path) + 1
            path = (*path, rank)

    tree, count = grown(), 20_000
    mean = sum(tokens(tree) for _ in range(count)) / count
    # Four standard deviations of a mean of numbers from 1 to 5.
    assert mean == pytest.approx(expected_tree(HEAD_ACCEPTANCE, nodes, deepest), abs=0.05)


def test_a_younger_child_is_never_likelier_than_the_first() -> None:
    for acceptance in (0.01, 0.1, 0.34, 0.5, 0.7, 0.95):
        assert sibling_acceptance(acceptance) < acceptance
    assert expected_tree(0.1, 5, 1) < 1.2
    # What the head of `scripts/bench eagle3_head` made: 1.88.
    assert expected_tree(0.34, 24, 3) == pytest.approx(1.88, rel=0.1)


def test_acceptance_that_a_run_with_trees_measured_is_that_of_any_child(tmp_path) -> None:
    for first in (0.2, 0.5, 0.8):
        held = 1 - (1 - first) * (1 - sibling_acceptance(first)) ** 4
        assert first_child_acceptance(held) == pytest.approx(first, abs=1e-6)
    stats = {
        "passes": 10,
        "acceptance": {"target": 0.9, "retrieval": None},
        "retrieval": None,
        "placement": {},
    }
    found = {}
    for trees in (0, 10):
        path = tmp_path / f"{trees}.json"
        path.write_text(json.dumps(stats | {"draft_tokens": {"trees": trees}}))
        found[trees] = AcceptanceCurve.measured(path).inner
    assert found[0] == pytest.approx(0.9)
    assert found[10] == pytest.approx(first_child_acceptance(0.9))
    assert 0.3 < found[10] < 0.7


def test_a_length_that_has_no_effect_keeps_trees() -> None:
    fixed = {"inner_draft_tokens": 3, "method": "speculative"}
    found = choose(replace(case(inner_draft_tokens=3), fixed=fixed))
    assert found.plan.method.draft_tokens == AUTO
