"""A level whose drafts only lose time is dropped: the text stays what it is, KV gets its memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from helpers import BLOCK, PLACEMENTS, random_ids
from test_draft_length import WORLDS, World

from triforce_core import Engine, SamplingParams
from triforce_core.decoding import draft_length
from triforce_core.decoding.draft_length import Auto, Fixed

PROMPT, NEW = 130, 40


def engine(path: Path, **options: object) -> Engine:
    return Engine.from_pretrained(
        path, **{"device": "cpu", "max_context": 200, "block_tokens": BLOCK, **options}
    )


@pytest.fixture
def hasty(monkeypatch):
    """Every level is lost after so many passes, whatever it gained."""

    def after(passes: int) -> None:
        asked: Counter[int] = Counter()

        def is_lost(ledger: draft_length.Ledger) -> bool:
            asked[id(ledger)] += 1
            return asked[id(ledger)] > passes

        monkeypatch.setattr(draft_length.Ledger, "is_lost", property(is_lost))

    return after


@pytest.mark.parametrize("world", WORLDS)
def test_only_a_level_that_never_pays_is_lost(world: str) -> None:
    length = Auto(64, 0.9, 16)
    cost = World(*WORLDS[world]).cost(length, 1000)
    assert length.ledger.is_lost == (world == "drafting does not pay")
    # It was lost for little.
    assert length.ledger.spent - length.ledger.saved < 0.05 * 1000 * cost


def test_a_level_that_has_paid_is_not_lost_by_a_text_it_does_not_pay_for() -> None:
    world, length = World(1.0, 0.1, 0.1, 0.95, 0.95), Auto(16, 0.6, 4)
    world.cost(length, 300)
    world.chances = dict.fromkeys(world.chances, 0.0)
    world.cost(length, 300)
    assert length.choose(16) == 0
    assert not length.ledger.is_lost


def test_a_length_that_was_asked_for_is_kept_to() -> None:
    world, length = World(1.0, 1.0, 1.0, 0.0, 0.0), Fixed(8)
    world.cost(length, 500)
    assert not length.ledger.is_lost


@pytest.mark.parametrize("placement", ["resident", "kv", "kv-in-part", "kv-lent"])
@pytest.mark.parametrize(
    ("passes", "options"), [(0, {}), (2, {"temperature": 1.0, "seed": 5})], ids=["greedy", "drawn"]
)
def test_text_stays_what_it_is_when_levels_are_dropped(
    tiny, hasty, placement: str, passes: int, options: dict
) -> None:
    path, _ = tiny("llama")
    other, _ = tiny("qwen3")
    params = SamplingParams(NEW, **{"temperature": 0, **options})
    prompts = [random_ids(PROMPT, seed) for seed in range(2)]
    common = {"placement": PLACEMENTS[placement], "accept": "coupled"}
    with engine(path, method="autoregressive", **common) as oracle:
        expected = [oracle.generate(prompt, params).token_ids for prompt in prompts]
    hasty(passes)
    lengths = {"draft_tokens": 6, "inner_draft_tokens": 3}
    with engine(path, draft=other, budget=32, **lengths, **common) as dropping:
        results = [dropping.generate(prompt, params) for prompt in prompts]
        assert dropping.models.small is None
        assert "it never paid" in dropping.plan_line
    assert [result.token_ids for result in results] == expected
    stats = results[-1].stats
    assert stats["levels"] == ["target"]
    assert stats["retrieval"] is None
    assert [dropped["level"] for dropped in stats["dropped"]] == ["retrieval", "model"]
    assert all(dropped["nbytes"] > 0 for dropped in stats["dropped"])
    assert dropping.runtime.memory.by_purpose() == {}


def test_the_drafter_alone_is_dropped(tiny) -> None:
    """Below a retrieval model that pays, which then proposes token by token."""
    path, _ = tiny("llama")
    other, _ = tiny("qwen3")
    prompt, params = random_ids(PROMPT), SamplingParams(NEW, temperature=0)
    options = {"draft": other, "budget": 32, "draft_tokens": 6}
    with engine(path, **options) as kept:
        expected = kept.generate(prompt, params).token_ids
    with engine(path, **options) as dropping:
        dropping.drafting._inner.ledger.idle = 10**6
        first, second = (dropping.generate(prompt, params) for _ in range(2))
    assert first.token_ids == second.token_ids == expected
    assert second.stats["levels"] == ["retrieval", "target"]
    assert [dropped["level"] for dropped in second.stats["dropped"]] == ["model"]
    assert second.stats["retrieval"]["steps"] > second.stats["passes"]


def test_kv_gets_the_memory_of_what_was_dropped(tiny, hasty) -> None:
    path, _ = tiny("llama")
    other, _ = tiny("qwen3")
    prompt, params = random_ids(PROMPT), SamplingParams(NEW, temperature=0)
    options = {"draft": other, "method": "speculative", "placement": PLACEMENTS["kv"]}
    with engine(path, **options) as kept:
        before = kept.generate(prompt, params).stats
        assert before["placement"]["resident_kv_blocks"] == 0
    hasty(1)
    with engine(path, **options) as dropping:
        after = [dropping.generate(prompt, params).stats for _ in range(2)]
    nbytes = after[0]["dropped"][0]["nbytes"]
    blocks = nbytes // dropping.runtime.demand.kv.block_bytes
    held = min(blocks, after[0]["placement"]["kv_blocks"])
    assert held > 0
    for stats in after:
        assert stats["placement"]["resident_kv_blocks"] == held
        assert stats["memory"]["device_peak_bytes"] <= before["memory"]["device_peak_bytes"]
    # A second request has the memory from its first pass on.
    assert after[1]["link"]["bytes_to_device"] < before["link"]["bytes_to_device"] / 2
