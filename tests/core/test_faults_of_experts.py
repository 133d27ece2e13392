"""Planted faults of routers and of pools of experts: a text that is right without one is wrong with
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from oracle import assert_equal_but_for_ties
from test_expert_pools import GREEDY, PLACED, PROMPT, engine

from triforce_core.model import mlps
from triforce_kernels.experts.routing import Choice, choose
from triforce_offload.weights.expert_pool import ExpertPool
from triforce_offload.weights.experts import RecentExperts

Weighed = tuple[torch.Tensor, torch.Tensor]


def scores_of(products: torch.Tensor, choice: Choice) -> torch.Tensor:
    return products.sigmoid() if choice.sigmoid else products.softmax(-1)


def normalised_before(products: torch.Tensor, bias: torch.Tensor | None, choice: Choice) -> Weighed:
    """The scores are divided by the sum over all experts, and not over those of the token."""
    chosen, weights = choose(products, bias, replace(choice, normalised=False))
    if choice.normalised:
        weights = weights / scores_of(products, choice).sum(-1, keepdim=True)
    return chosen, weights


def bias_in_weights(products: torch.Tensor, bias: torch.Tensor | None, choice: Choice) -> Weighed:
    """What should choose the experts alone is in their weights too."""
    chosen, _ = choose(products, bias, choice)
    scores = scores_of(products, choice)
    weights = (scores if bias is None else scores + bias).gather(1, chosen)
    if choice.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * choice.scale


ROUTERS = {"normalised before the choice": normalised_before, "the bias weighs": bias_in_weights}
# Of scores that are a softmax, of sigmoids, and of sigmoids of which groups are chosen first.
NORMALISED = ("qwen3_moe", "mixtral", "gpt-oss-moe", "minimax_m2-moe", "glm4_moe")
BIASED = ("ernie4_5_moe", "minimax_m2-moe", "lfm2-moe", "glm4_moe", "deepseek_v3-moe")


def assert_own_text(path: Path, model: torch.nn.Module, placed: str) -> None:
    """The text is the model's own, and experts made room for others."""
    theirs = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=GREEDY.max_new_tokens, do_sample=False
    )
    with engine(path, placement=PLACED[placed]) as running:
        result = running.generate(PROMPT, GREEDY)
        pools = running.runtime.expert_pools.values()
        assert all(pool.inserted_bytes and -1 not in pool.recent.expert_in for pool in pools)
    assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs[0, len(PROMPT) :].tolist())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("fault", "family"),
    [
        *(("normalised before the choice", family) for family in NORMALISED),
        *(("the bias weighs", family) for family in BIASED),
    ],
)
def test_a_router_that_weighs_wrongly_is_noticed(
    tiny, monkeypatch, fault: str, family: str
) -> None:
    path, model = tiny(family)
    assert_own_text(path, model, "some")
    monkeypatch.setattr(mlps, "choose", ROUTERS[fault])
    with pytest.raises(AssertionError, match="token"):
        assert_own_text(path, model, "some")


def one_pass_old(own: Callable) -> Callable:
    """`ExpertPool.divide` with the slots that experts had in the pass before."""
    before: WeakKeyDictionary[ExpertPool, list[int]] = WeakKeyDictionary()

    def divide(pool: ExpertPool, chosen: torch.Tensor) -> Weighed:
        own(pool, chosen)
        now = list(pool.recent.slot_of)
        slot_of, before[pool] = before.get(pool, now), now
        slots = torch.tensor([[slot_of[expert] for expert in row] for row in chosen.tolist()])
        return slots, chosen.where(slots < 0, -1)

    return divide


def still_found(recent: RecentExperts, slot: int) -> None:
    """`RecentExperts.empty`, after which the expert that was there is still found."""
    recent.expert_in[slot] = -1


POOLS = {
    "an address one pass old": (ExpertPool, "divide", one_pass_old(ExpertPool.divide)),
    "an evicted expert": (RecentExperts, "empty", still_found),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", POOLS)
@pytest.mark.parametrize("placed", ["one", "some", "KV streams too"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt-oss-moe", "olmoe"])
def test_an_expert_that_is_no_longer_there_is_noticed(
    tiny, monkeypatch, family: str, placed: str, fault: str
) -> None:
    path, model = tiny(family)
    assert_own_text(path, model, placed)
    monkeypatch.setattr(*POOLS[fault])
    with pytest.raises(AssertionError, match="token"):
        assert_own_text(path, model, placed)
