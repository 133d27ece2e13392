"""Plans in which a processor computes layers, experts and KV: when it pays, and how much."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command import run

from triforce_core.model.known.shapes import read_model
from triforce_core.plan.fitting import ProcessorShares
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.processor import _LAYER_SECONDS, Processor, fastest_counts
from triforce_core.plan.simulation.search import choose
from triforce_kernels.host.structures import FORMATS
from triforce_kernels.weights.block_types import ALL_TYPES, WITHOUT_KERNELS, BlockType
from triforce_offload.errors import UsageError
from triforce_offload.machine.profiles import named
from triforce_offload.plan.placing import (
    for_processor,
    layers_for_kv,
    place,
    place_on_processor,
    with_kv_instead,
)
from triforce_offload.weights.formats import DTYPES

# A desktop: two channels of DDR5, 16 cores.
DESKTOP = {"host_bytes_per_second": 60e9, "host_flops_per_second": 1.5e12}


def case(model: str, **rates: float) -> Case:
    shape = read_model(model)
    card = replace(named("rtx4090"), **rates)
    return Case(shape.config, card, 8192, pieces=shape.pieces)


@pytest.mark.parametrize("model", ["llama3.1-70b:Q4_K_M", "qwen3-30b-a3b:Q8_0", "gpt-oss-120b"])
def test_a_desktops_processor_makes_passes_faster(model: str) -> None:
    alone, shared = choose(case(model)), choose(case(model, **DESKTOP))
    assert not alone.memory.placement.processor_layers
    assert shared.memory.placement.processor_layers
    assert shared.seconds_per_token < 0.85 * alone.seconds_per_token
    assert shared.memory.device_bytes <= shared.case.room.device_bytes
    # Prefills copy all of them.
    assert shared.memory.weights_prefill_link_bytes > shared.memory.weights_link_bytes


def test_kv_that_streams_is_shared_with_the_processor() -> None:
    shape = read_model("llama2-7b-128k")
    alone, shared = (
        choose(Case(shape.config, replace(named("rtx4090"), **rates), 131072))
        for rates in ({}, DESKTOP)
    )
    assert alone.memory.placement.processor_kv == 0 < shared.memory.placement.processor_kv < 1
    assert shared.round.pass_seconds < 0.5 * alone.round.pass_seconds
    assert shared.seconds_per_token < 0.75 * alone.seconds_per_token
    # Longer drafts are more arithmetic: less is left to the processor.
    shares = [replace(shared.round, tokens=n).fastest_kv_shares - {1.0} for n in (1, 33, 129, 257)]
    rows = [max(some) for some in shares]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > rows[-1]


def test_a_slow_host_computes_nothing() -> None:
    for slow in (
        DESKTOP | {"host_bytes_per_second": 25.3e9},
        DESKTOP | {"host_flops_per_second": 2e10},
    ):
        chosen = choose(case("llama3.1-70b:Q4_K_M", **slow))
        assert not chosen.memory.placement.uses_processor


def test_link_and_processor_share_the_rate_of_host_memory() -> None:
    chosen = choose(case("llama3.1-70b:Q4_K_M", **DESKTOP))
    memory, rate = chosen.memory, DESKTOP["host_bytes_per_second"]
    read = memory.link_bytes + memory.processor_bytes
    assert chosen.round.seconds >= 0.99 * read / rate
    # Alone, it takes what it reads; beside a link that never rests, what the link leaves.
    able = case("llama3.1-70b:Q4_K_M", host_bytes_per_second=rate, host_flops_per_second=1e13)
    processor = Processor(able.costs, 1)
    layer = processor.seconds(1, 0.0)
    assert processor.seconds(10, 0.0) == pytest.approx(10 * layer)
    link = chosen.case.hardware.stream_bytes_per_second
    own = 10 * _LAYER_SECONDS
    left = (10 * layer - own) * rate / (rate - link) + own
    assert processor.seconds(10, 1e12) == pytest.approx(left)
    # Of many rows, arithmetic.
    rows = replace(processor, tokens=400), replace(processor, tokens=800)
    assert rows[1].seconds(10, 0.0) == pytest.approx(2 * rows[0].seconds(10, 0.0), rel=0.05)


def test_the_fastest_count_is_that_of_a_search_by_simulation() -> None:
    chosen = choose(case("llama3.1-70b:Q4_K_M", **DESKTOP))
    none = place_on_processor(chosen.memory, 0)
    cost = replace(chosen.round, memory=none)
    processor = Processor(chosen.case.costs, cost.tokens)
    counts = fastest_counts(processor, none, cost.compute_seconds)
    seconds = [
        replace(cost, memory=place_on_processor(none, count)).seconds
        for count in range(len(for_processor(none)) + 1)
    ]
    assert min(seconds[count] for count in counts) <= 1.05 * min(seconds)


def test_formats_without_kernels_are_left_to_the_device() -> None:
    """Their tables have thousands of entries, which no kernel of a processor has."""
    assert {name for name in ALL_TYPES if name not in FORMATS} == WITHOUT_KERNELS
    plain = case("llama3.1-70b:Q4_K_M", **DESKTOP)

    def pieces(name: str) -> list[tuple[int, BlockType | None]]:
        return [(rows, kind and ALL_TYPES["IQ1_S"]) for rows, kind in plain.pieces(name)]

    assert not choose(replace(plain, pieces=pieces)).memory.placement.processor_layers
    with pytest.raises(UsageError, match="the CPU computes no layers in IQ1_S"):
        choose(replace(plain, pieces=pieces, host_compute=0.5))


def test_experts_are_read_as_rows_choose_them() -> None:
    sparse = case("gpt-oss-120b", **DESKTOP)
    few, many = (Processor(sparse.costs, rows).seconds(1, 0.0) for rows in (1, 64))
    whole = choose(sparse).memory.layers[0].nbytes / DESKTOP["host_bytes_per_second"]
    assert few < 0.15 * whole
    assert many > 5 * few


@pytest.mark.parametrize("model", ["glm-4.5-air:Q4_K_M", "mixtral-8x7b:Q4_K_M"])
def test_the_processor_has_experts_and_the_device_the_kv(model: str) -> None:
    """A layer's experts take milliseconds there, and its bytes hold KV that would stream."""
    shape = read_model(model)
    card = replace(named("rtx4090"), **DESKTOP)
    chosen = choose(Case(shape.config, card, 32768, pieces=shape.pieces))
    memory, placement = chosen.memory, chosen.memory.placement
    assert len(placement.processor_layers) >= len(placement.expert_layers) > 0
    assert memory.weights_link_bytes == 0
    assert memory.processor_bytes < sum(memory.layers[i].nbytes for i in placement.processor_layers)
    assert memory.device_bytes <= chosen.case.room.device_bytes
    # With as few layers there as fit without KV, more of the KV would be away.
    fewest = place(memory.requirements, chosen.case.room.device_bytes)
    assert len(fewest.streamed_layers) < len(memory.streamed_layers)
    assert fewest.kv.away > memory.kv.away
    everything = place_on_processor(fewest, len(for_processor(fewest)))
    assert chosen.round.seconds < 0.9 * replace(chosen.round, memory=everything).seconds


@pytest.mark.parametrize("model", ["glm-4.5-air:Q4_K_M", "llama3.1-70b:Q4_K_M", "llama2-7b-128k"])
@pytest.mark.parametrize("context", [4096, 32768])
def test_kv_takes_the_place_of_layers_byte_by_byte(model: str, context: int) -> None:
    shape = read_model(model)
    case = Case(shape.config, named("rtx4090"), context, pieces=shape.pieces)
    plan = place(case.sizes(case.method).requirements(0), case.room.device_bytes)
    for more in sorted(layers_for_kv(plan)):
        moved = with_kv_instead(plan, more)
        count = len(moved.streamed_layers) - len(plan.streamed_layers)
        assert count in (0, more)
        assert moved.device_bytes <= plan.device_bytes
        assert moved.kv.resident >= plan.kv.resident
        moved.check(case.room.device_bytes)
        if more == max(layers_for_kv(plan)) and count and more < len(plan.layers) // 2:
            assert moved.kv.away <= plan.kv.away // 4


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("model", "context"),
    [
        ("llama2-13b-128k", 8192),
        ("qwen2.5-14b", 32768),
        ("llama3.1-8b", 131072),
        ("qwen3-30b-a3b:Q8_0", 32768),
    ],
)
def test_a_retrieval_level_has_its_layers_on_the_device(model: str, context: int) -> None:
    """However fast the processor is, and however much KV streams."""
    shape = read_model(model)
    card = replace(named("rtx4090"), **DESKTOP)
    plain = Case(shape.config, card, context, pieces=shape.pieces)
    for fixed in ({}, {"method": "triforce"}):
        chosen = choose(replace(plain, fixed=fixed))
        assert chosen.memory.can_draft or not chosen.plan.budget
        shares = ProcessorShares.of(chosen.memory)
        again = place_on_processor(shares.with_streamed_layers(chosen.memory), 0)
        assert (
            shares.placed_on_processor(again, chosen.case.room).placement == chosen.memory.placement
        )


@pytest.mark.parametrize(
    ("model", "context"),
    [
        ("gpt-oss-120b", 131072),
        ("qwen3-30b-a3b:Q8_0", 32768),
        ("qwen3-next-80b-a3b:Q4_K_M", 32768),
        ("glm-4.5-air:Q4_K_M", 32768),
        ("nemotron-3-nano-30b-a3b", 32768),
    ],
)
def test_an_engine_has_the_pools_and_the_kv_of_its_plan(model: str, context: int) -> None:
    """It begins with a placement of its own, by bytes."""
    shape = read_model(model)
    card = replace(named("rtx4090"), **DESKTOP)
    chosen = choose(Case(shape.config, card, context, pieces=shape.pieces))
    planned, room = chosen.memory.placement, chosen.case.room
    assert planned.expert_slots > 0
    own = place(chosen.memory.requirements, room.device_bytes)
    shares = ProcessorShares.of(chosen.memory)
    found = shares.placed_on_processor(shares.with_streamed_layers(own), room).placement
    assert found == planned


def test_experts_in_bfloat16_are_split_each_for_itself() -> None:
    """They are faster so than dense, or in split layers, which have to be away as a whole."""
    plain = replace(case("qwen3.5-35b-a3b", **DESKTOP), dtype=DTYPES["bfloat16"], pieces=None)
    chosen = choose(replace(plain, auto=frozenset(["weights"])))
    assert chosen.plan.weights == "split-experts"
    assert chosen.memory.placement.expert_slots > 0
    for split in (None, "split"):
        other = choose(replace(plain, split=split))
        assert chosen.seconds_per_token < 0.9 * other.seconds_per_token
        assert chosen.memory.host_bytes < other.memory.host_bytes
    assert chosen.plan.line(40, 80).endswith(", experts split")


def test_plain_decoding_is_planned_where_drafts_read_too_many_experts() -> None:
    chosen = choose(case("gpt-oss-120b", **DESKTOP))
    assert chosen.plan.method.method == "autoregressive"
    drafting = replace(chosen.case, fixed={"method": "speculative"})
    assert choose(drafting).seconds_per_token > chosen.seconds_per_token
    # A user's own drafts stay.
    eight = choose(replace(chosen.case, fixed={"draft_tokens": 8}))
    assert (eight.plan.method.method, eight.plan.method.draft_tokens) == ("speculative", 8)
    without = choose(replace(chosen.case, draft="none"))
    assert without.plan.method.method == "autoregressive"


def test_layers_of_different_sizes_are_weighed_by_their_mean() -> None:
    """The first layer of GLM-4.5-Air is dense, and a ninth of the others."""
    plain = case("glm-4.5-air:Q4_K_M", **DESKTOP)
    chosen = choose(replace(plain, fixed={"method": "speculative", "draft_tokens": 16}))
    seconds = {}
    for count in range(0, len(for_processor(chosen.memory)) + 1, 4):
        memory = place_on_processor(chosen.memory, count)
        seconds[count] = replace(chosen.round, memory=memory).seconds
    assert chosen.round.seconds <= 1.05 * min(seconds.values())


def test_the_command_plans_with_a_processor(capsys) -> None:
    words = ["plan", "gpt-oss-120b", "--gpu", "rtx4090", "-c", "8192", "--json"]
    rates = ["--host-bandwidth", "60GB/s", "--host-flops", "1.5e12"]
    counts = []
    for more in ([], rates, [*rates, "--host-compute=off"], [*rates, "--host-compute=0.5"]):
        _, out, _ = run(capsys, *words, *more)
        counts.append(json.loads(out)["placement"]["processor_layers"])
    assert counts[0] == counts[2] == 0 < counts[3] < counts[1]
    code, _, err = run(capsys, *words, "--host-compute=0.5")
    assert (code, "give --host-bandwidth and --host-flops" in err) == (2, True)
    _, out, _ = run(capsys, *words, *rates, "--gpus=2", "--host-compute=0.5")
    assert 0 < json.loads(out)["placement"]["processor_layers"] < 36
    code, _, err = run(capsys, *words, "--host-flops=1e12")
    assert (code, "--host-flops needs --host-bandwidth" in err) == (2, True)
    code, _, err = run(capsys, *words, "--host-bandwidth=60GB/s", "--host-flops=-1")
    assert (code, "a rate of operations must be positive and finite" in err) == (2, True)


def test_a_share_changes_a_plan_file(capsys, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ["plan", "gpt-oss-120b", "--gpu", "rtx4090", "-c", "8192", "--json"]
    words += ["--host-bandwidth", "60GB/s", "--host-flops", "1.5e12"]
    assert run(capsys, *words, "--save", file)[0] == 0
    counts = []
    for more in ([], ["--host-compute=off"], ["--host-compute=0.5"]):
        _, out, _ = run(capsys, *words, "--plan", file, *more)
        counts.append(json.loads(out)["placement"]["processor_layers"])
    assert counts[1] == 0 < counts[2] < counts[0]


def test_on_a_machine_without_a_gpu_the_device_is_the_processor() -> None:
    """What it attends to on the side is no time that the device saves."""
    shape = read_model("llama3.2-1b")
    device = replace(
        named("rtx4090", 4), asynchronous=False, link_bytes_per_second=50e9, memory_bytes=3 << 30
    )
    costs = [
        choose(
            Case(
                shape.config, device, 32768, host_compute=share, fixed={"method": "autoregressive"}
            )
        ).round
        for share in (0.0, 0.5, 1.0)
    ]
    assert costs[0].link_bytes > costs[1].link_bytes > costs[2].link_bytes
    for cost in costs[1:]:
        assert cost.compute_seconds == pytest.approx(costs[0].compute_seconds, rel=0.02)
