"""Experts of which some are on the device as well: the text, and what a pool holds and copies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import write_gguf
from helpers import BLOCK, PLACEMENTS, make_model, random_ids
from oracle import assert_equal_but_for_ties
from tiny_families import WITH_EXPERTS

from triforce_core import Engine, SamplingParams
from triforce_offload.errors import DoesNotFitError, LinkError, UsageError
from triforce_offload.weights.expert_pool import ExpertPool
from triforce_offload.weights.experts import MOST_INSERTED

PROMPT, GREEDY = random_ids(60), SamplingParams(20, temperature=0)
ALL = replace(PLACEMENTS["weights"], expert_layers=(0, 1, 2), processor_layers=(0, 1, 2))
PLACED = {
    "one": replace(ALL, expert_slots=1),
    "some": replace(ALL, expert_slots=3),
    "all": replace(ALL, expert_slots=4),
    "KV streams too": replace(
        PLACEMENTS["both"], expert_layers=(0, 1), processor_layers=(0, 1), expert_slots=2
    ),
    "some layers": replace(ALL, processor_layers=(1,), expert_slots=2),
}


def engine(path: Path, **options: object) -> Engine:
    common = {"device": "cpu", "max_context": 120, "block_tokens": BLOCK, "draft": "ngram"}
    return Engine.from_pretrained(path, **common | options)


def assert_whole(pool: ExpertPool) -> None:
    """Every expert is where the pool says that it is."""
    pool.finish()
    for slot, expert in enumerate(pool.recent.expert_in):
        if expert >= 0:
            assert pool.recent.slot_of[expert] == slot
            for part in pool._parts:
                assert torch.equal(part.of_slot(slot), part.of_expert(pool._host, expert))
    found = [slot for slot in pool.recent.slot_of if slot >= 0]
    assert len(set(found)) == len(found) == sum(expert >= 0 for expert in pool.recent.expert_in)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", WITH_EXPERTS)
@pytest.mark.parametrize("placed", PLACED)
def test_the_text_is_the_model_s(tiny, family: str, placed: str) -> None:
    path, model = tiny(family)
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)
    with engine(path, placement=PLACED[placed]) as running:
        allocated = running.memory_plan.device_bytes
        result, pools = running.generate(PROMPT, GREEDY), running.runtime.expert_pools
        for pool in pools.values():
            assert pool.hits + pool.misses > 0
            assert_whole(pool)
        assert running.runtime.memory.peak_bytes <= allocated
    assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("stored", ["Q8_0", "MXFP4"])
def test_quantised_experts_with_and_without_biases(tmp_path, stored: str) -> None:
    path = tmp_path
    if stored == "MXFP4":
        make_model("gpt-oss-moe", path)
    else:
        path = tmp_path / "m.gguf"
        write_gguf(make_model("qwen2_moe", tmp_path), path, gguf.GGMLQuantizationType[stored])
    with engine(path, weights="stored", placement=PLACEMENTS["resident"]) as resident:
        expected = resident.generate(PROMPT, GREEDY).token_ids
    with engine(path, weights="stored", placement=PLACED["some"]) as running:
        assert running.generate(PROMPT, GREEDY).token_ids == expected
        for pool in running.runtime.expert_pools.values():
            assert pool.hits > 0
            assert_whole(pool)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_split_experts_are_the_dense_ones_in_fewer_bytes(tiny, family: str) -> None:
    """To the last bit, wherever they are."""
    path, _ = tiny(family)
    results, crossed, away = {}, {}, {}
    for weights in ("dense", "split-experts"):
        for name in ("streamed", "computed", "some"):
            placement = PLACED["some"]
            if name != "some":
                layers = ALL.processor_layers if name == "computed" else ()
                placement = replace(ALL, processor_layers=layers)
            options = {"placement": placement, "dtype": "bfloat16", "weights": weights}
            with engine(path, **options) as running:
                result = running.generate(PROMPT, replace(GREEDY, logprobs=3))
                results[weights, name] = result.token_ids, result.logprobs
                crossed[weights, name] = result.stats["link"]["bytes_to_device"]
                away[weights] = sum(layer.expert_bytes for layer in running.memory_plan.layers)
                for pool in running.runtime.expert_pools.values():
                    assert_whole(pool)
    for name in ("streamed", "computed", "some"):
        assert results["split-experts", name] == results["dense", name], name
    assert away["split-experts"] < away["dense"]
    assert crossed["split-experts", "streamed"] < crossed["dense", "streamed"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_half_precision(tiny, family: str, dtype: str) -> None:
    path, _ = tiny(family)
    with engine(path, placement=PLACED["some"], dtype=dtype) as running:
        result = running.generate(PROMPT, GREEDY)
        assert len(result.token_ids) == GREEDY.max_new_tokens
        for pool in running.runtime.expert_pools.values():
            assert_whole(pool)


def test_the_experts_of_a_prompt_s_end_are_there_before_the_first_pass(tiny) -> None:
    with engine(tiny("qwen3_moe")[0], placement=PLACED["some"], method="autoregressive") as running:
        running.generate(PROMPT, SamplingParams(1, temperature=0))
        for pool in running.runtime.expert_pools.values():
            assert all(expert >= 0 for expert in pool.recent.expert_in)
            assert pool.inserted_bytes == 0
            assert_whole(pool)


@pytest.fixture
def pool(tmp_path):
    """The pool of 3 of 8 experts of a layer, with a link that takes its time."""
    make_model("qwen3_moe", tmp_path, num_experts=8)
    with engine(tmp_path, placement=PLACED["some"], link_bandwidth=50e6) as running:
        yield next(iter(running.runtime.expert_pools.values()))


def chosen(*experts: int) -> torch.Tensor:
    return torch.tensor([experts])


def test_the_expert_that_was_used_longest_ago_makes_room(pool: ExpertPool) -> None:
    for expert in (0, 1, 2):
        pool.used(chosen(expert))
    pool.used(chosen(0))
    pool.used(chosen(5))
    assert {0, 2, 5} == set(pool.recent.expert_in)
    pool.used(chosen(0, 2, 5, 6))
    assert {0, 2, 5} == set(pool.recent.expert_in), "an expert that was just used stays"
    assert (pool.hits, pool.misses) == (4, 5)
    assert_whole(pool)


def test_an_expert_that_made_room_and_is_still_found_is_noticed(
    pool: ExpertPool, monkeypatch
) -> None:
    """A planted fault: `assert_whole` fails after it. See test_faults_of_experts.py for texts."""
    for expert in (0, 1, 2, 5):
        pool.used(chosen(expert))
    assert_whole(pool)
    monkeypatch.setattr(pool.recent, "empty", lambda slot: None)
    pool.used(chosen(7))
    with pytest.raises(AssertionError):
        assert_whole(pool)


def test_no_more_experts_cross_than_a_pass_has_time_for(pool: ExpertPool) -> None:
    pool.used(torch.tensor([[3, 4], [6, 7], [7, 6]]))
    assert set(pool.recent.expert_in) == {6, 7, -1}, "those of most rows come first"
    one = sum(part.nbytes for part in pool._parts)
    assert pool.inserted_bytes == MOST_INSERTED * one
    slots, others = pool.divide(torch.tensor([[3, 4], [6, 7]]))
    assert others.tolist() == [[3, 4], [-1, -1]]
    assert [pool.recent.expert_in[slot] for slot in slots[1].tolist()] == [6, 7]
    assert slots[0].tolist() == [-1, -1]
    assert_whole(pool)


def test_a_prompt_s_last_rows_count_most(pool: ExpertPool) -> None:
    pool.used(chosen(0, 1))
    device = pool._host.clone()
    for part in ([[6, 7]], [[0, 1], [2, 3], [4, 5]], [[3, 4]]):
        pool.note(torch.tensor(part))
    pool.fill(device)
    assert set(pool.recent.expert_in) == {3, 4, 5}
    pool.used(chosen(7))
    assert {3, 4, 7} == set(pool.recent.expert_in)
    assert_whole(pool)


def test_a_copy_that_fails_leaves_its_slot_empty(pool: ExpertPool, monkeypatch) -> None:
    pool.used(chosen(4, 5))

    def fails(event: object) -> None:
        raise LinkError("lost")

    with monkeypatch.context() as patched:
        patched.setattr(pool._link, "wait", fails)
        for _ in range(len(pool._coming)):
            with pytest.raises(LinkError):
                pool.divide(chosen(4, 5))
    slots, others = pool.divide(chosen(4, 5))
    assert slots.tolist() == [[-1, -1]]
    assert others.tolist() == [[4, 5]]
    assert_whole(pool)


def test_what_cannot_be_is_refused(tiny) -> None:
    with pytest.raises(UsageError, match="expert_slots 3 of a placement need expert_layers"):
        replace(ALL, processor_layers=(), expert_slots=3)
    with pytest.raises(UsageError, match="expert_slots of a placement cannot be 9"):
        engine(tiny("qwen3_moe")[0], placement=replace(ALL, expert_slots=9))
    with engine(tiny("qwen3_moe")[0], placement=PLACED["some"]) as running:
        plan = running.memory_plan
    without = plan.placed(expert_slots=0)
    pools = sum(layer.pool_bytes for layer in plan.layers)
    assert plan.device_bytes - without.device_bytes == pools > 0
    assert plan.host_bytes == without.host_bytes
    with pytest.raises(DoesNotFitError):
        plan.check(plan.device_bytes - 1)
