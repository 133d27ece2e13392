"""F5 for models with experts: on the device, streamed, computed by the processor, in pools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from allocations import allocated_peak
from helpers import BLOCK, PLACEMENTS, make_model, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.model.known.shapes import read_shape
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.search import choose
from triforce_kernels import dispatch
from triforce_kernels.dispatch import REFERENCE
from triforce_offload.machine.profiles import named
from triforce_offload.weights.formats import DTYPES

CONTEXT, NEW = 1900, 24
LAYERS = (0, 1, 2)
# Experts that take most of the weights: dense and quantised ones, beside windows and states too.
FAMILIES = {
    "qwen3_moe": {"num_experts": 32, "moe_intermediate_size": 96, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 32, "intermediate_size": 96},
    "gpt-oss-moe": {"num_local_experts": 32},
    "qwen3_5_moe": {"num_experts": 32, "moe_intermediate_size": 96},
}
SLOTS = 8
APART = {"streamed_layers": LAYERS, "expert_layers": LAYERS, "processor_layers": LAYERS}
# Device memory, and what a plan is asked for.
WAYS: dict[str, tuple[int, dict[str, object]]] = {
    "on the device": (18_000_000, {}),
    "streamed": (12_500_000, {}),
    "on the host": (12_500_000, {"host_compute": 1.0}),
    "pools": (17_000_000, {"fixed": APART | {"expert_slots": SLOTS, "weight_slots": 2}}),
}


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is for a GPU, where PyTorch's operators compute prompts."""
    monkeypatch.setattr(dispatch, "_forced", REFERENCE)


def made(family: str, path: Path) -> Path:
    make_model(family, path, max_position_embeddings=2048, **FAMILIES[family])
    return path


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_planned_bytes_of_experts_are_those_that_are_taken(tmp_path, family: str, way: str) -> None:
    path, (memory, asked) = made(family, tmp_path), WAYS[way]
    case = Case(
        read_shape(str(path)),
        # No graphs are recorded on a CPU, so none are planned for.
        replace(named("rtx4090", 4), memory_bytes=memory, asynchronous=False),
        CONTEXT,
        NEW,
        DTYPES["float32"],
        block_bytes=16 << 10,
        **asked | {"fixed": {"method": "autoregressive"} | asked.get("fixed", {})},
    )
    chosen = choose(case)
    placement, budget = chosen.memory.placement, {"device_memory": memory, "max_context": CONTEXT}
    assert placement.expert_layers == (() if way == "on the device" else LAYERS)
    assert placement.processor_layers == (LAYERS if way in ("on the host", "pools") else ())
    with Engine.from_pretrained(path, device="cpu", plan=chosen.plan, **budget) as engine:
        assert engine.memory_plan.placement == placement
        assert sum(pool.slots for pool in engine.runtime.expert_pools.values()) == (
            3 * SLOTS if way == "pools" else 0
        )
        params = SamplingParams(NEW, temperature=0)
        taken = engine.generate(random_ids(CONTEXT - NEW), params).stats["memory"]
    assert chosen.device_bytes == pytest.approx(taken["device_peak_bytes"], rel=0.05)
    assert taken["device_peak_bytes"] <= memory
    # Marks are made as texts grow, and are in no arena.
    arenas = chosen.host_bytes - chosen.memory.requirements.marks_bytes
    block = chosen.memory.kv.shape.block_bytes
    assert arenas == pytest.approx(taken["host_bytes"], rel=0.05, abs=block)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_5_moe"])
@pytest.mark.parametrize("slots", [0, SLOTS])
@pytest.mark.parametrize("kv_streams", [False, True])
def test_accounted_bytes_cover_experts_of_the_processor_and_pools(
    tmp_path, two_threads, family: str, slots: int, kv_streams: bool
) -> None:
    path, base = made(family, tmp_path), PLACEMENTS["both" if kv_streams else "weights"]
    placement = replace(base, **APART, expert_slots=slots)
    options = {"placement": placement, "method": "autoregressive", "block_tokens": 4 * BLOCK}
    found = {}

    def run() -> None:
        with Engine.from_pretrained(path, device="cpu", max_context=1520, **options) as engine:
            stats = engine.generate(random_ids(1500), SamplingParams(20)).stats
            found["accounted"] = stats["memory"]["device_peak_bytes"]
            found["planned"] = engine.memory_plan.device_bytes
            found["marks"] = engine.memory_plan.requirements.marks_bytes

    peak = allocated_peak(run, (path / "model.safetensors").stat().st_size)
    assert found["planned"] == pytest.approx(found["accounted"], rel=0.05)
    assert peak <= found["accounted"] + found["marks"]
    # The workspace is for rows that all choose the same experts.
    assert found["accounted"] <= 1.35 * peak
