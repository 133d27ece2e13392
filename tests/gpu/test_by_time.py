"""An engine on a card whose rates are known: seconds choose its formats and its retrieval cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import FAMILIES, PLACEMENTS, make_model, random_ids
from simulated_gpu import TOKENS

from triforce_core import Engine, SamplingParams
from triforce_core.plan import by_time
from triforce_kernels.dispatch import TRITON
from triforce_offload.errors import UsageError
from triforce_offload.machine.processor import ProcessorRates
from triforce_offload.machine.profiles import named
from triforce_offload.memory.available import LIBRARY_BYTES

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0)


@pytest.mark.one_in(99)
@pytest.mark.parametrize(
    ("memory", "sequences"), [(400_000_000, 1), (147_000_000, 1), (400_000_000, 2)]
)
def test_text_is_that_of_the_cpu_however_seconds_choose(
    tiny, monkeypatch, memory: int, sequences: int
) -> None:
    """With room for everything, and with little."""
    path, _ = tiny("llama")
    prompt, chosen = random_ids(60), []
    with Engine.from_pretrained(path, device="cpu", max_context=200) as engine:
        expected = engine.generate(prompt, GREEDY).token_ids
    fastest = by_time.fastest

    def recorded(*arguments: object) -> object:
        chosen.append(fastest(*arguments))
        return chosen[-1]

    monkeypatch.setattr(by_time, "fastest", recorded)
    monkeypatch.setattr("triforce_core.loading.load.rates", lambda *_: named("rtx4090", 4))
    monkeypatch.setattr("triforce_core.loading.devices.backend", lambda device: TRITON)
    with Engine.from_pretrained(
        *(path,),
        **{"device": "cuda:0", "device_memory": memory, "max_context": 200, "dtype": "float32"},
        sequences=sequences,
    ) as engine:
        texts = [each.token_ids for each in engine.generate_all([prompt] * sequences, GREEDY)]
        assert texts == [expected] * sequences
        assert len(chosen) == 1
        assert engine.plan.budget <= chosen[0].plan.budget
        assert engine.memory_plan.device_bytes <= engine.memory.limit_bytes


@pytest.mark.one_in(99)
@pytest.mark.parametrize("rates", [None, ProcessorRates(60e9, 1e12), ProcessorRates(1e6, 1e12)])
def test_the_processor_computes_what_would_cross_a_slow_link(tiny, monkeypatch, rates) -> None:
    path, _ = tiny("llama")
    prompt = random_ids(60)
    with Engine.from_pretrained(path, device="cpu", max_context=200) as engine:
        expected = engine.generate(prompt, GREEDY).token_ids
    slow = replace(named("rtx4090", 4), link_bytes_per_second=2e6)
    monkeypatch.setattr(by_time, "measure_processor", lambda: rates)
    monkeypatch.setattr("triforce_core.loading.load.rates", lambda *_: slow)
    monkeypatch.setattr("triforce_core.loading.devices.backend", lambda device: TRITON)
    options = {"max_context": 200, "dtype": "float32", "method": "autoregressive"}
    options |= {"device": "cuda:0", "placement": PLACEMENTS["weights"], "cuda_graphs": False}
    with Engine.from_pretrained(path, **options) as engine:
        plan = engine.memory_plan
    # Nothing but KV blocks could be given up for weights, and one more layer.
    own = plan.device_bytes - plan.kv.device_bytes + plan.layers[0].nbytes
    options |= {"placement": None, "device_memory": LIBRARY_BYTES + own}
    counts = {}
    for share in ("auto", "off"):
        with Engine.from_pretrained(path, **options, host_compute=share) as engine:
            assert engine.generate(prompt, GREEDY).token_ids == expected
            assert engine.memory_plan.weights_prefill_link_bytes > 0
            counts[share] = engine.memory_plan.layer_counts["processor_layers"]
    assert (counts["auto"] > 0) == (rates is not None and rates.bytes_per_second > 2e6)
    assert counts["off"] == 0


def test_experts_go_to_the_processor_and_kv_to_the_device(tmp_path, monkeypatch) -> None:
    """As in the plan: as many layers are away, and the text stays."""
    path = tmp_path
    make_model("mixtral", path, num_hidden_layers=8)
    prompt = random_ids(150)
    with Engine.from_pretrained(path, device="cpu", max_context=200) as engine:
        expected = engine.generate(prompt, GREEDY).token_ids
    slow = replace(named("rtx4090", 4), link_bytes_per_second=2e6)
    monkeypatch.setattr(by_time, "measure_processor", lambda: ProcessorRates(60e9, 1e12))
    monkeypatch.setattr("triforce_core.loading.load.rates", lambda *_: slow)
    monkeypatch.setattr("triforce_core.loading.devices.backend", lambda device: TRITON)
    chosen, choose = [], by_time.choose
    monkeypatch.setattr(by_time, "choose", lambda case: chosen.append(choose(case)) or chosen[-1])
    options = {"max_context": 200, "dtype": "float32", "block_tokens": 16, "device": "cuda:0"}
    with Engine.from_pretrained(path, placement=PLACEMENTS["resident"], **options) as engine:
        plan = engine.memory_plan
    # Less than everything takes without recorded passes, by two layers.
    most = plan.device_bytes - plan.requirements.drafting_bytes
    options |= {"device_memory": LIBRARY_BYTES + most - 2 * plan.layers[0].nbytes}
    with Engine.from_pretrained(path, **options) as engine:
        assert engine.generate(prompt, GREEDY).token_ids == expected
        mine, planned = engine.memory_plan.placement, chosen[-1].memory.placement
    assert mine.expert_layers == mine.processor_layers
    # An engine that learns how long drafts are takes more workspace than a plan with one length.
    assert len(mine.processor_layers) >= len(planned.processor_layers) > 0
    assert engine.memory_plan.weights_link_bytes == 0


def test_the_same_bits_exclude_what_the_processor_computes(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    monkeypatch.setattr("triforce_core.loading.devices.backend", lambda device: TRITON)
    options = {"device": "cuda:0", "max_context": 200, "same_bits": "on"}
    with pytest.raises(UsageError, match="--same-bits on is not possible where the CPU"):
        Engine.from_pretrained(path, **options, host_compute=0.5)
    with Engine.from_pretrained(path, **options, host_compute="off") as engine:
        assert not engine.memory_plan.streams


@pytest.mark.first
@pytest.mark.parametrize(
    "family", ["gpt-oss-moe", *(each for each in FAMILIES if "oss" not in each)]
)
def test_every_family_loads_on_a_card_whose_rates_are_known(tiny, monkeypatch, family: str) -> None:
    path, _ = tiny(family)
    monkeypatch.setattr("triforce_core.loading.load.rates", lambda *_: named("rtx4090", 2))
    monkeypatch.setattr("triforce_core.loading.devices.backend", lambda device: TRITON)
    with Engine.from_pretrained(path, device="cuda:0", max_context=200) as engine:
        assert not engine.memory_plan.streams
