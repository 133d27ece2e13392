"""Pools of experts under a retrieval level and under trees: the text is the one without pools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import PLACEMENTS, make_model, random_ids
from oracle import assert_own_texts
from test_expert_pools import GREEDY, PLACED, assert_whole, engine

from triforce_core import Completion, Engine, SamplingParams

# Twice the same, so that n-grams have something to say.
PROMPT = random_ids(35) * 2
# Of one seed the text is the same whatever is drafted.
SAMPLED = replace(GREEDY, temperature=0.8, seed=3)
# Enough experts that a pass of many rows does not choose all of them.
FAMILIES = {
    "qwen3_moe": {"num_experts": 32},
    "mixtral": {"num_local_experts": 32},
    "qwen3_5_moe": {"num_experts": 32},
    "glm4_moe": {"n_routed_experts": 32},
}
COPIES = {"copied_layers": (0, 1, 2)}
# Options and placements. "{self}" is the model itself, which drafts what it says.
RUNS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "retrieval level": ({"draft": "none", "budget": 32, "draft_tokens": 4}, COPIES),
    "retrieval level over n-grams": ({"draft": "ngram", "budget": 32, "draft_tokens": 6}, COPIES),
    "trees of the retrieval level": ({"draft": "none", "budget": 32, "tree": 12}, COPIES),
    "trees of a model": ({"draft": "{self}", "method": "speculative", "tree": 12}, {}),
    "trees of both": ({"draft": "ngram", "budget": 32, "tree": 24}, COPIES),
}
# Recurrent layers read a tree as a chain.
CHAINS_ALONE = ("qwen3_5_moe",)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories and twins of models with many experts, made once."""
    made = {}

    def of(family: str) -> tuple[Path, object]:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            made[family] = (path, make_model(family, path, **FAMILIES[family]))
        return made[family]

    return of


def assert_pools_were_used(running: Engine) -> None:
    pools = running.runtime.expert_pools.values()
    assert pools
    for pool in pools:
        assert pool.hits > 0
        assert pool.misses > 0
        assert_whole(pool)
    assert sum(pool.inserted_bytes for pool in pools) > 0


def without_drafts(path: Path, params: SamplingParams) -> Completion:
    """What the model says where it has neither pools nor drafts."""
    options = {"method": "autoregressive", "accept": "coupled"}
    with engine(path, placement=PLACEMENTS["resident"], **options) as resident:
        return resident.generate(PROMPT, params)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "run"),
    [
        (family, run)
        for family in FAMILIES
        for run in RUNS
        if family not in CHAINS_ALONE or "tree" not in RUNS[run][0]
    ],
)
@pytest.mark.parametrize("placed", ["some", "KV streams too"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_do_not_change_the_text(
    models, family: str, run: str, placed: str, params: SamplingParams
) -> None:
    path, model = models(family)
    plain = without_drafts(path, params)
    options, copies = RUNS[run]
    placement = replace(PLACED[placed], expert_slots=8, **copies)
    draft = str(options["draft"]).format(self=path)
    options = options | {"draft": draft, "accept": "coupled", "placement": placement}
    with engine(path, **options) as running:
        result = running.generate(PROMPT, params)
        assert_pools_were_used(running)
    stats = result.stats
    assert ("retrieval" in stats["levels"]) == ("budget" in options)
    assert (stats["draft_tokens"]["trees"] > 0) == ("tree" in options)
    if params is GREEDY:
        assert_own_texts(model, [PROMPT], [params], [plain], [result])
    else:
        assert result.token_ids == plain.token_ids
