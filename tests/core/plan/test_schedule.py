"""One schedule, two executors: a real run's trace holds what the planner's simulation says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import BLOCK, PLACEMENTS, random_ids
from oracle import greedy
from tiny_parts import LAYERS

from bench.plot_trace import read_trace
from triforce_core import Engine
from triforce_core.plan.simulation.costs.forward import Costs
from triforce_core.plan.simulation.costs.round import RoundCost
from triforce_offload.machine.profiles import named
from triforce_offload.plan.simulate import spans
from triforce_offload.weights.formats import DTYPES

PROMPT = 75


def described(name: str, args: dict) -> tuple:
    return name, args["layer"], args.get("block"), args["bytes"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("method", ["autoregressive", "speculative"])
def test_a_run_copies_what_its_simulation_does_in_the_same_order(
    tiny, tmp_path, placement: str, method: str
) -> None:
    path, _ = tiny("llama")
    file, where = tmp_path / "trace.json", PLACEMENTS[placement]
    if where.processor_kv:
        # In the first pass the processor leaves out blocks that are to lie in reclaimed memory.
        where = replace(where, reclaimed_kv_blocks=0)
    with Engine.from_pretrained(
        path,
        device="cpu",
        max_context=200,
        block_tokens=BLOCK,
        placement=where,
        method=method,
        draft="none",
        trace=file,
    ) as engine:
        stats = engine.generate(random_ids(PROMPT), greedy(40)).stats
        plan = engine.memory_plan
    copied = [described(event.name, event.args) for event in read_trace(file)["copy in"]]
    card = replace(named("rtx4090", 4), host_bytes_per_second=60e9, host_flops_per_second=1e12)
    costs = Costs(engine.config, DTYPES["float32"], card)
    expected = [
        ("weights", layer, None, plan.layers[layer].nbytes) for layer in plan.streamed_layers
    ]
    for length in range(PROMPT, PROMPT + stats["passes"]):
        # Blocks come to lie in reclaimed memory as they cross in the first pass.
        placed = plan.placed(reclaimed_kv_blocks=0) if length == PROMPT else plan
        crossings, works, timeline = RoundCost(costs, placed, length, 1).executed
        shown = spans(crossings, works, timeline, 0.0)
        expected += [described(s.name, s.args) for s in shown if s.track == "copy in"]
        layers = [span.args["layer"] for span in shown if span.name == "layer"]
        assert layers == sorted(layers)
        assert set(layers) == set(range(LAYERS))
    assert copied == expected
    assert placement != "kv-reclaimed" or plan.kv.reclaimed > 0
