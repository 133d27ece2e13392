"""An engine on a card whose rates are known: seconds choose its formats and its retrieval cache."""

from __future__ import annotations

import pytest
from helpers import FAMILIES, random_ids
from simulated_gpu import TOKENS

from triforce_core import Engine, SamplingParams
from triforce_core.plan import by_time
from triforce_kernels.dispatch import TRITON
from triforce_offload.machine.profiles import named

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0)


@pytest.mark.parametrize("memory", [400_000_000, 147_000_000])
def test_text_is_that_of_the_cpu_however_seconds_choose(tiny, monkeypatch, memory: int) -> None:
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
        path, device="cuda:0", device_memory=memory, max_context=200, dtype="float32"
    ) as engine:
        assert engine.generate(prompt, GREEDY).token_ids == expected
        assert len(chosen) == 1
        assert engine.plan.budget <= chosen[0].plan.budget
        assert engine.memory_plan.device_bytes <= engine.memory.limit_bytes


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
