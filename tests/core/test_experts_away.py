"""Layers of which the experts alone are away: the text, what crosses the link, what the processor
computes, and when a plan keeps layers so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from fp8_files import quantise as to_fp8
from gguf_files import write_gguf
from helpers import BLOCK, PLACEMENTS, make_model, random_ids
from integer_files import WAYS, to_integers
from oracle import assert_equal_but_for_ties
from thread_ranks import engine as on_ranks
from tiny_families import WITH_EXPERTS

from triforce_core import Engine, SamplingParams
from triforce_core.plan.plan import Plan
from triforce_core.settings import MethodSettings
from triforce_offload.errors import UsageError
from triforce_offload.plan.memory_plan import MemoryPlan, Where
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import place, place_on_host, place_on_processor

PROMPT, GREEDY = random_ids(60), SamplingParams(20, temperature=0)
ALL = replace(PLACEMENTS["weights"], expert_layers=(0, 1, 2))
PLACED = {
    "streamed": ALL,
    "one slot, some": replace(PLACEMENTS["weights-one-slot"], expert_layers=(2,)),
    "KV streams too": replace(PLACEMENTS["both"], expert_layers=(0, 1)),
    "computed by the processor": replace(ALL, processor_layers=(0, 1, 2)),
    "some of each": replace(ALL, expert_layers=(1, 2), processor_layers=(0, 1)),
}


def engine(path: Path, **options: object) -> Engine:
    common = {"device": "cpu", "max_context": 120, "block_tokens": BLOCK, "draft": "ngram"}
    return Engine.from_pretrained(path, **common | options)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", WITH_EXPERTS)
@pytest.mark.parametrize("placed", PLACED)
def test_the_text_is_the_model_s_and_experts_alone_cross(tiny, family: str, placed: str) -> None:
    path, model = tiny(family)
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)
    with engine(path, placement=PLACED[placed]) as running:
        result, plan = running.generate(PROMPT, GREEDY), running.memory_plan
        layouts = running.runtime.weights.layouts
    assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs[0, len(PROMPT) :].tolist())
    link, kv = result.stats["link"], plan.kv.away > 0
    crossing = sum(layer.link_bytes for layer in plan.layers)
    assert link["bytes_to_device"] >= result.stats["passes"] * crossing
    assert link["bytes_to_device"] == result.stats["passes"] * crossing or kv
    for index, (layer, layout) in enumerate(zip(plan.layers, layouts, strict=True)):
        if layer.where is Where.DEVICE:
            continue
        apart = layout.expert_bytes if index in plan.placement.expert_layers else 0
        assert layer.prefill_link_bytes == (apart or layout.nbytes)
        assert layer.link_bytes + layer.processor_bytes == layer.prefill_link_bytes
        assert layer.device_bytes + layer.host_bytes == layout.nbytes
    assert result.stats["memory"]["weights_bytes"] > 0


@pytest.mark.first
@pytest.mark.parametrize("processor", [(), (0, 1, 2)])
@pytest.mark.parametrize("stored", ["Q8_0", "MXFP4", "FP8", "awq", "w4a16"])
def test_quantised_experts(tmp_path, stored: str, processor: tuple[int, ...]) -> None:
    path = tmp_path / "m.gguf"
    if stored in ("FP8", *WAYS):
        sizes = {"hidden_size": 128, "intermediate_size": 384, "moe_intermediate_size": 128}
        path = tmp_path
        model = make_model("qwen3_moe", path, head_dim=64, num_key_value_heads=1, **sizes)
        if stored == "FP8":
            to_fp8(path, model)
        else:
            to_integers(path, model, stored)
    elif stored == "MXFP4":
        path = tmp_path
        make_model("gpt-oss-moe", path)
    else:
        write_gguf(make_model("qwen2_moe", tmp_path), path, gguf.GGMLQuantizationType[stored])
    with engine(path, weights="stored", placement=PLACEMENTS["resident"]) as resident:
        expected = resident.generate(PROMPT, GREEDY).token_ids
    placement = replace(ALL, processor_layers=processor)
    with engine(path, weights="stored", placement=placement) as running:
        assert running.generate(PROMPT, GREEDY).token_ids == expected
        assert any(layer.device_bytes for layer in running.memory_plan.layers)


def test_copies_in_4_bits_draft_for_layers_whose_experts_stream(tiny) -> None:
    path, model = tiny("qwen3_moe")
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)
    placement = replace(ALL, copied_layers=(0, 1, 2))
    with engine(path, placement=placement, draft="none", budget=32, draft_tokens=3) as running:
        result = running.generate(PROMPT, GREEDY)
    assert result.stats["levels"] == ["retrieval", "target"]
    assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs[0, len(PROMPT) :].tolist())


def test_two_ranks_stream_their_parts_of_the_experts(tiny, monkeypatch) -> None:
    path, model = tiny("qwen3_moe")
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)
    with on_ranks(path, 2, placement="weights", draft="ngram") as whole:
        before = whole.generate(PROMPT, GREEDY)
    monkeypatch.setitem(PLACEMENTS, "experts", ALL)
    with on_ranks(path, 2, placement="experts", draft="ngram") as running:
        result = running.generate(PROMPT, GREEDY)
    assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs[0, len(PROMPT) :].tolist())
    crossed, all_crossed = (each.stats["link"]["bytes_to_device"] for each in (result, before))
    assert 0 < crossed < all_crossed


@pytest.fixture
def needs(tiny):
    """What a model with experts requires."""
    with engine(tiny("mixtral")[0], placement=PLACEMENTS["resident"]) as running:
        return running.memory_plan.requirements


def test_a_plan_keeps_all_but_experts_where_that_fits(needs) -> None:
    sizes = zip(needs.expert_bytes, needs.layer_bytes, strict=True)
    assert all(0 < experts < whole for experts, whole in sizes)
    everything = place(needs, 1 << 40).device_bytes
    least = MemoryPlan(needs, Placement((0, 1, 2), False, 0, 2, 3, 2)).device_bytes
    fronts = sum(needs.layer_bytes) - sum(needs.expert_bytes)
    seen = set()
    for limit in range(least, everything, max(1, (everything - least) // 40)):
        plan = place(needs, limit)
        assert plan.device_bytes <= limit
        apart, streamed = plan.placement.expert_layers, plan.placement.streamed_layers
        assert apart in ((), streamed)
        seen.add(bool(apart))
        assert apart or not streamed or limit < least + fronts
    assert seen == {False, True}


def test_layers_that_the_host_has_no_room_for_are_whole_in_their_files(needs) -> None:
    plan = MemoryPlan(needs, ALL)
    placed = place_on_host(plan, plan.host_bytes - 1)
    files = set(placed.placement.file_layers)
    assert files
    assert set(placed.placement.expert_layers) == {0, 1, 2} - files
    assert all(placed.layers[layer].device_bytes == 0 for layer in files)


def test_the_processor_is_left_the_experts(needs) -> None:
    placed = place_on_processor(MemoryPlan(needs, ALL), 2)
    computed = [layer for layer in placed.layers if layer.where is Where.PROCESSOR]
    assert len(computed) == 2
    assert placed.processor_bytes == sum(layer.expert_bytes for layer in computed)
    assert placed.device_bytes == MemoryPlan(needs, ALL).device_bytes


def test_what_cannot_be_is_refused(tiny, tmp_path) -> None:
    for wrong in ({"streamed_layers": (0,)}, {"split_layers": (1,)}, {"file_layers": (1,)}):
        with pytest.raises(UsageError, match="expert_layers"):
            replace(ALL, **wrong)
    with pytest.raises(UsageError, match="expert_layers of a placement are of weights"):
        engine(tiny("llama")[0], placement=ALL)
    plan = Plan(120, BLOCK, MethodSettings(method="speculative"), ALL)
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
