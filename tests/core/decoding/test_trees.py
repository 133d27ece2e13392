"""L1 and L2 for drafts that branch; how they grow."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import PropertyMock, patch

import pytest
import torch
from float_bounds import forward_bound
from helpers import BLOCK, make_model, random_ids
from law_tests import (
    LEAST_P,
    emitted_by_trees,
    p_value,
    random_law,
    tree_configuration,
    trees_drawn,
)

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.acceptance import Coupled, Draft, Optimal
from triforce_core.decoding.trees import tree
from triforce_core.decoding.trees.tree import Branches
from triforce_core.settings import EngineConfig
from triforce_offload.errors import CheckpointError, UsageError
from triforce_offload.forward_batch import ForwardBatch

DRAWS = int(os.environ.get("TRIFORCE_DRAWS", 50_000))
# A root with a drawn child and two others, the first and the last of which have children.
FORK = Branches((0, 0, 0, 1, 1, 3), (0, 3, 5))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(50))
def test_what_comes_after_each_row_has_the_target_law(seed: int) -> None:
    branches, draft, target = tree_configuration(seed)
    counts = emitted_by_trees(
        branches, draft, target, DRAWS, torch.Generator().manual_seed(2000 + seed)
    )
    assert counts[0].sum() == DRAWS
    for row in range(len(counts)):
        assert p_value(counts[row : row + 1], target[row : row + 1]) > LEAST_P, row


def fork(seed: int, vocab: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = [random_law(vocab, "full", generator) for _ in range(10)]
    return torch.stack(probs[:3]), torch.stack(probs[3:])


def law_of_fork(propose: Callable[..., torch.Tensor] = trees_drawn) -> float:
    draft, target = fork(5)
    counts = emitted_by_trees(
        FORK, draft, target, 20_000, torch.Generator().manual_seed(6), propose
    )
    return p_value(counts, target)


def the_targets_own_law(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p


def what_the_draft_lacks(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p - q).abs()


@pytest.mark.parametrize("wrong", [the_targets_own_law, what_the_draft_lacks])
def test_later_children_against_a_wrong_residual_are_found_out(wrong: Callable) -> None:
    assert law_of_fork() > LEAST_P
    with patch.object(tree, "residual", wrong):
        assert law_of_fork() < LEAST_P


def test_duplicates_among_children_are_found_out() -> None:
    def twice(branches, draft, target, trials, generator) -> torch.Tensor:
        tokens = trees_drawn(branches, draft, target, trials, generator)
        tokens[:, 2] = tokens[:, 1]
        return tokens

    assert law_of_fork(twice) < LEAST_P


def test_a_first_child_that_is_chosen_by_what_was_drawn_is_found_out() -> None:
    def the_likelier(branches, draft, target, trials, generator) -> torch.Tensor:
        ways = [trees_drawn(branches, draft, target, trials, generator) for _ in range(2)]
        sure = [draft[0][way[:, :1]] for way in ways]
        return torch.where(sure[0] >= sure[1], *ways)

    assert law_of_fork(the_likelier) < LEAST_P


def test_children_that_were_tried_are_not_drawn_again() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2, 0.0]] * 3)
    branches, rule = Branches((0, 0)), Optimal(torch.Generator().manual_seed(0))
    draft = Draft(torch.tensor([0, 1]), branches=branches)
    came = set()
    for _ in range(200):
        verdict = rule.accept(draft, target, 5)
        came.add((int(verdict.accepted), int(verdict.token) if not verdict.accepted else -1))
    # Rejected both: what is left is the third token. Accepted: whatever comes.
    assert came == {(0, 2), (1, -1), (2, -1)}


def test_what_is_no_number_is_told() -> None:
    draft, target = fork(1)
    target[0, 3] = float("nan")
    for rule in (Optimal(torch.Generator().manual_seed(0)), Coupled(3)):
        tokens = torch.arange(6)
        assert int(rule.accept(Draft(tokens, draft, (), FORK), target, 5).token) == -1


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_seeds_tree_is_followed_as_far_as_it_says_what_plain_decoding_does(temperature) -> None:
    vocab, rule = 6, Coupled(17)
    generator = torch.Generator().manual_seed(9)
    for trial in range(100):
        probs = (torch.randn(7, vocab, generator=generator) / temperature).softmax(-1)
        tokens = torch.tensor([*torch.randperm(vocab, generator=generator)[:3], 1, 4, 2])
        verdict = rule.accept(Draft(tokens, None, (), FORK), probs, trial)
        row = 0
        while True:
            own = int(rule.draw(probs[row : row + 1], trial + FORK.depths[row]))
            after = [child for child in FORK.children[row] if tokens[child - 1] == own]
            if not after:
                break
            row = after[0]
        assert (int(verdict.accepted), int(verdict.token)) == (row, own)


def test_branches_know_their_paths() -> None:
    assert FORK.children == ((1, 2, 3), (4, 5), (), (6,), (), (), ())
    assert FORK.depths == (0, 1, 1, 1, 2, 2, 2)
    assert FORK.of_batch == (-1, 0, 0, 0, 1, 1, 3)
    assert FORK.path(6) == [0, 3, 6]
    assert FORK.examined([0, 3]) == [(1, False), (2, False), (3, True), (6, False)]
    assert FORK.examined([0, 1, 4]) == [(1, True), (4, True)]
    with pytest.raises(ValueError, match="row 1 of a draft cannot follow row 1"):
        Branches((1,))
    with pytest.raises(ValueError, match="row 2 was drawn"):
        Branches((0, 0), (1,))


SIZES = {"vocab_size": 24, "initializer_range": 0.2}
PROMPT = random_ids(30, 3, 24) * 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    twin = make_model("llama", target, **SIZES)
    make_model("llama-mha", drafter, **SIZES)
    return target, drafter, twin


def engine(models, **options: object) -> Engine:
    options = {"draft": str(models[1]), "method": "speculative", "tree": 20} | options
    return Engine.from_pretrained(
        models[0], device="cpu", max_context=160, block_tokens=BLOCK, **options
    )


def test_a_siblings_keys_that_are_seen_are_found_out(models) -> None:
    """By any text, which is plain decoding's otherwise."""
    params = SamplingParams(60, temperature=0)
    with engine(models, method="autoregressive", tree="auto") as plain:
        expected = plain.generate(PROMPT, params).token_ids
    with engine(models) as branching:
        assert branching.generate(PROMPT, params).token_ids == expected
        all_before = PropertyMock(side_effect=lambda: None)
        with patch.object(ForwardBatch, "visible", all_before):
            assert branching.generate(PROMPT, params, reuse=False).token_ids != expected


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_a_tree_gives_more_tokens_a_pass_than_a_chain(models, draft: str) -> None:
    options = {"draft": str(models[1]) if draft == "model" else draft}
    passes = {}
    for shape in ("off", 20):
        with engine(models, tree=shape, draft_tokens=20, **options) as each:
            result = each.generate(PROMPT, SamplingParams(90, temperature=0.8, top_p=1.0, seed=2))
        stats = result.stats
        assert stats["finish_reason"] == "length"
        passes[shape] = stats["passes"]
        assert (stats["draft_tokens"]["trees"] > 0) == (shape == 20)
        assert stats["draft_tokens"]["mean"] <= 20
        siblings, accepted = stats["draft_tokens"]["from_siblings"], 90 - stats["passes"] - 1
        assert 0 <= siblings <= accepted
        if draft == "model":
            assert (siblings > 0) == (shape == 20)
    if draft == "model":
        assert passes[20] < 0.8 * passes["off"]


def test_a_length_limit_and_a_depth_that_was_asked_for_hold(models) -> None:
    with engine(models, draft=str(models[0]), draft_tokens=3) as each:
        for new in (1, 2, 3, 9):
            result = each.generate(PROMPT, SamplingParams(new, temperature=0))
            assert len(result.token_ids) == new
            # Of itself as a drafter all but the last of each pass is accepted.
            assert len(result.stats["acceptance"]["accepted_lengths"]) <= 4


def test_trees_follow_penalties(models) -> None:
    params = SamplingParams(20, temperature=0, repeat_penalty=1.3)
    with engine(models) as each:
        result = each.generate(PROMPT, params)
        assert result.stats["draft_tokens"]["trees"] > 0
    with engine(models, method="autoregressive", tree="auto") as plain:
        assert plain.generate(PROMPT, params).token_ids == result.token_ids


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_logprobs_are_those_of_plain_decoding(models, draft: str) -> None:
    params = SamplingParams(40, temperature=0, logprobs=3)
    options = {"draft": str(models[1]) if draft == "model" else draft}
    near = 2 * forward_bound(models[2], len(PROMPT) + 40).logprobs
    with engine(models, **options) as each, engine(models, method="autoregressive") as plain:
        own, expected = (e.generate(PROMPT, params).logprobs for e in (each, plain))
    assert [one.token for one in own] == [one.token for one in expected]
    for one, other in zip(own, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=near)
        assert {token for token, _ in one.likeliest} == {token for token, _ in other.likeliest}


def test_a_drafter_that_computes_no_number_is_told(models, tmp_path) -> None:
    broken = make_model("llama-mha", tmp_path, **SIZES)
    broken.lm_head.weight.data.fill_(float("nan"))
    broken.save_pretrained(tmp_path)
    with engine(models, draft=str(tmp_path)) as each, pytest.raises(CheckpointError, match="finit"):
        each.generate(PROMPT, SamplingParams(20, temperature=0.5))


@pytest.mark.parametrize("value", [0, 1, 257, "on", 3.5, True])
def test_settings_of_trees_are_checked(value: object) -> None:
    with pytest.raises(UsageError, match="tree must be auto, off or 2 to 256"):
        EngineConfig().changed(tree=value)


def test_room_for_a_tree_is_planned(models) -> None:
    with engine(models, draft_tokens=4, tree=100) as each:
        assert each.runtime.plan.requirements.max_pass_tokens == 101
