"""A level whose drafts only lose time is dropped: the text stays what it is, KV gets its memory."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path

import pytest
from helpers import BLOCK, PLACEMENTS, random_ids
from test_draft_length import WORLDS, World

from triforce_core import Engine, SamplingParams
from triforce_core.decoding import draft_length
from triforce_core.decoding.draft_length import Auto, DraftLength, Fixed

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
    cost = decode(World(*WORLDS[world]), length, 1000)
    assert length.ledger.is_lost == (world == "drafting does not pay")
    # It was lost for little.
    assert length.ledger.seconds - length.ledger.plain_seconds < 0.05 * 1000 * cost


def test_a_level_that_has_paid_is_not_lost_by_a_text_it_does_not_pay_for() -> None:
    world = World(1.0, 0.1, 0.1, 0.95, 0.95)
    length = Auto(16, 0.6, 4, plain_first=True)
    decode(world, length, 300)
    world.chances = dict.fromkeys(world.chances, 0.0)
    decode(world, length, 300)
    assert length.choose(16) == 0
    assert not length.ledger.is_lost


def test_a_length_that_was_asked_for_is_kept_to() -> None:
    world, length = World(1.0, 1.0, 1.0, 0.0, 0.0), Fixed(8)
    decode(world, length, 500)
    assert not length.ledger.is_lost


def test_a_gain_that_is_too_small_to_draft_for_loses_the_level() -> None:
    """One yardstick: what is not worth a draft has not paid either."""
    world, length = World(1.0, 0.0, 0.55, 0.73, 0.63), Auto(16, 0.6, 4, plain_first=True)
    decode(world, length, 2000)
    assert length.ledger.is_lost


def test_drafts_are_judged_only_beside_a_round_without_one() -> None:
    """A line through one length says nothing of what plain decoding takes."""
    length = Auto(16, 0.6, 4)
    world = World(1.0, 0.5, 0.1, 0.9, 0.9)
    for _ in range(3):
        world.round(length, confident=False)
    assert length.ledger.drafts == 0


def decode(world: World, length: DraftLength, rounds: int) -> float:
    """Seconds a token of so many rounds, each a pass."""
    cost = 0.0
    for _ in range(rounds):
        cost += world.cost(length, 1)
        length.end_pass()
    return cost / rounds


@pytest.mark.one_in(8)
@pytest.mark.parametrize("placement", ["resident", "kv", "kv-in-part", "kv-reclaimed"])
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
    with engine(path, draft=other, **lengths, **common) as dropping:
        model = weakref.ref(dropping.models.small.model)
        retrieves = dropping.models.budget > 0
        results = [dropping.generate(prompt, params) for prompt in prompts]
        assert dropping.models.small is None
        gc.collect()
        assert model() is None, "its memory is used twice"
        assert ("it never paid" in dropping.plan_line) == retrieves
        assert "drafts of" not in dropping.plan_line
    assert retrieves == (placement != "resident")
    assert [result.token_ids for result in results] == expected
    stats = results[-1].stats
    assert stats["levels"] == ["target"]
    assert stats["retrieval"] is None
    assert (results[0].stats["retrieval"] is not None) == retrieves
    levels = ["retrieval", "model"] if retrieves else ["model"]
    assert [dropped["level"] for dropped in stats["dropped"]] == levels
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
        ledger = dropping.drafting._inner.ledger
        ledger.drafts = ledger.idle = 10**6
        ledger.seconds = 1.0
        first, second = (dropping.generate(prompt, params) for _ in range(2))
    assert first.token_ids == second.token_ids == expected
    assert second.stats["levels"] == ["retrieval", "target"]
    assert [dropped["level"] for dropped in second.stats["dropped"]] == ["model"]
    assert second.stats["retrieval"]["steps"] > second.stats["passes"]


def test_a_short_text_says_nothing_of_long_ones(tiny, hasty) -> None:
    """And a budget that was asked for is kept to."""
    path, _ = tiny("llama")
    params = SamplingParams(20, temperature=0)
    hasty(0)
    for budget in (None, 32):
        with engine(path, budget=budget, placement=PLACEMENTS["kv"]) as running:
            short = running.generate(random_ids(30), params).stats
            assert short["levels"] == ["ngram", "retrieval", "target"]
            long = running.generate(random_ids(PROMPT), params).stats
            assert ("retrieval" in long["levels"]) == (budget is not None)


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
    blocks = nbytes // dropping.runtime.plan.kv.shape.block_bytes
    held = min(blocks, after[0]["placement"]["kv_blocks"])
    assert held > 0
    for stats in after:
        assert stats["placement"]["resident_kv_blocks"] == held
        assert stats["memory"]["device_peak_bytes"] <= before["memory"]["device_peak_bytes"]
    # A second request has the memory from its first pass on.
    assert after[1]["link"]["bytes_to_device"] < before["link"]["bytes_to_device"] / 2
