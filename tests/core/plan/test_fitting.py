"""What is made of a model's wishes: more memory never streams more, nor drafts worse."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from triforce_core.engine import Engine
from triforce_core.model.known.shapes import read_shape
from triforce_core.model.tensors import split_layouts
from triforce_core.plan.fitting import Resolved, fit_device
from triforce_core.plan.machine import Device
from triforce_core.plan.plan import Plan
from triforce_core.plan.simulation.candidates import evaluate
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import MethodSettings
from triforce_offload.errors import DoesNotFitError
from triforce_offload.machine.profiles import named
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import place
from triforce_offload.units import parse_bytes
from triforce_offload.weights.formats import DTYPES

GIB = 1 << 30


NOTHING_HERE = Placement((), False, 0, 0, 3, 2)


def wanted(shape: str, context: int, **method: object) -> ModelSizes:
    settings, device = MethodSettings(**method), Device(copy_bytes=16 << 20)
    return ModelSizes(read_shape(shape), DTYPES["float16"], context, settings, device=device)


def crosses(fitted: Resolved) -> int:
    """Bytes of a pass over a full context."""
    return fitted.memory.link_bytes


@pytest.mark.parametrize("layouts", ["exact", "int4", "split"])
@pytest.mark.parametrize("budget", [1024, 16384])
def test_a_budget_fits_where_the_refusal_says(layouts: str, budget: int) -> None:
    """Whatever there was too little for: the cache, the KV, or the weights that the level reads."""
    drafts = {} if layouts == "split" else {"draft_weights": layouts}
    asks = wanted("llama3.1-8b", 16384, budget=budget, **drafts)
    if layouts == "split":
        dtype = DTYPES["bfloat16"]
        asks = replace(asks, dtype=dtype, layouts=split_layouts(asks.config, dtype))
    for memory in (GIB // 2, 2 * GIB, 4 * GIB):
        with pytest.raises(DoesNotFitError) as refused:
            fit_device(asks, memory)
        needed = refused.value.needed_bytes
        assert fit_device(asks, needed).budget == budget
        with pytest.raises(DoesNotFitError):
            fit_device(asks, needed - 1)


@pytest.mark.first
@pytest.mark.parametrize(
    ("shape", "context"),
    [("llama3.1-8b", 131072), ("llama2-7b-128k", 65536), ("llama2-7b", 4096)],
)
def test_what_fits_at_every_size_of_memory(shape: str, context: int) -> None:
    asks = wanted(shape, context)
    seen: list[Resolved] = []
    # Budgets where the target alone streams KV only, and where it streams nothing.
    between, fits = [], []
    for quarters in range(8, 4 * 90):
        memory = quarters * GIB // 4
        try:
            fitted = fit_device(asks, memory)
        except DoesNotFitError:
            assert not seen, "refused where less was accepted"
            continue
        assert fitted.memory.device_bytes <= memory
        seen.append(fitted)
        if fitted.budget:
            assert fitted.memory.can_draft
        without = asks.requirements(0)
        if place(without, memory).streams:
            if not fitted.memory.placement.streamed_layers:
                between.append(fitted.budget)
        else:
            fits.append(fitted.budget)
            # A cache that nobody asked for sends no more over the link than comes meanwhile.
            read = (
                fitted.memory.requirements.weights_bytes
                + MemoryPlan(fitted.memory.requirements, NOTHING_HERE).link_bytes
            )
            assert crosses(fitted) <= read / 40
    streaming = [fitted for fitted in seen if fitted.memory.placement.streamed_layers]
    # From some size of memory on what streams has copies in 4 bits that draft.
    drafts = [fitted.budget > 0 for fitted in streaming]
    assert drafts == sorted(drafts)
    assert any(drafts)
    assert between == sorted(between)
    assert fits == sorted(fits)
    assert not crosses(seen[-1])
    if context > 4096:
        assert max(between) == 4096
        assert seen[-1].budget, "reads of KV are most of what a pass reads"
    else:
        assert not seen[-1].budget


def test_a_budget_that_is_asked_for_is_made_where_nothing_streams() -> None:
    assert fit_device(wanted("llama2-7b", 4096), 80 * GIB).budget == 0
    assert fit_device(wanted("llama2-7b", 4096, budget=512), 80 * GIB).budget == 512


def test_reclaimed_memory_counts_as_the_devices_own() -> None:
    asks = wanted("llama3.1-8b", 131072).requirements(0)
    placed = (place(asks, quarters * GIB // 4) for quarters in range(100, 200))
    plan = next(p for p in placed if p.kv.resident < p.kv.blocks and not p.streams)
    assert plan.kv.reclaimed
    assert plan.placed(reclaimed_kv_blocks=plan.kv.reclaimed - 1).streams


@pytest.mark.parametrize(("shape", "context"), [("llama3.1-8b", 131072), ("qwen2.5-32b", 8192)])
def test_more_memory_is_never_slower(shape: str, context: int) -> None:
    """By what the planner says of the placements that the engine chooses itself."""
    asks = wanted(shape, context, draft_tokens=24, inner_draft_tokens=3)
    seconds = []
    for gib in range(6, 90, 2):
        try:
            fitted = fit_device(asks, gib << 30)
        except DoesNotFitError:
            assert not seconds, "refused where less was accepted"
            continue
        case = Case(asks.config, named("rtx4090"), context, 256)
        plan = Plan.of(asks.method, fitted.memory, fitted.budget)
        seconds.append(evaluate(case, plan, fitted.memory).seconds_per_token)
    assert len(seconds) > 35
    for less, more in pairwise(seconds):
        assert more <= 1.02 * less


def test_kv_that_stays_and_is_not_chosen_from_is_one_block() -> None:
    """Its tail takes the whole text and no more."""
    asks = wanted("llama2-7b", 4096, method="autoregressive")
    small, large = fit_device(asks, 8 * GIB), fit_device(asks, 40 * GIB)
    assert small.memory.requirements.kv_blocks > 0
    assert large.memory.requirements.kv_blocks == 0
    assert large.memory.requirements.kv.tail_tokens(1) == 4097
    assert not MemoryPlan(large.memory.requirements, large.memory.placement).streams
    asked = fit_device(replace(asks, block_tokens=256), 40 * GIB)
    assert asked.memory.requirements.kv.block_tokens == 256
    chosen_from = fit_device(wanted("llama2-7b", 4096, budget=1024), 40 * GIB)
    assert chosen_from.memory.requirements.kv_blocks > 0


def test_one_block_is_made_only_where_it_fits() -> None:
    """At every size of memory from streaming to resident, and once nothing streams it stays so."""
    asks = wanted("llama2-7b", 4096, method="autoregressive")
    resident = []
    for eighths in range(8 * 13, 8 * 18):
        fitted = fit_device(asks, eighths * GIB // 8)
        assert fitted.memory.device_bytes <= eighths * GIB // 8
        resident.append(crosses(fitted) == 0)
        if not resident[-1]:
            assert fitted.memory.requirements.kv_blocks > 0
    assert resident == sorted(resident)
    assert resident[-1]


@pytest.mark.parametrize(
    ("size", "options"),
    [(1_000_000, {}), (1_000_000, {"budget": 64}), (1_800_000, {"host_memory": 300_000})],
)
def test_a_refusal_says_which_context_would_fit(speaking, size: int, options: dict) -> None:
    """The context that it names is loaded, and one token more is refused again."""

    def load(context: int, **changed: object) -> None:
        settings = {"device": "cpu", "device_memory": size, **options, **changed}
        with Engine.from_pretrained(speaking, max_context=context, **settings):
            pass

    with pytest.raises(DoesNotFitError, match=r"up to \d+ tokens of context fit") as refused:
        load(512)
    context = int(re.search(r"up to (\d+) tokens", str(refused.value))[1])
    assert ("without the budget of 64 tokens" in str(refused.value)) == ("budget" in options)
    load(context, budget=None)
    with pytest.raises(DoesNotFitError):
        load(context + 1, budget=None)


def test_a_refusal_says_so_where_no_context_would_fit(speaking) -> None:
    with pytest.raises(DoesNotFitError) as refused:
        Engine.from_pretrained(speaking, device="cpu", device_memory=1000, max_context=200)
    said = re.search(
        r"is available; no context fits: 16 tokens need ([\d.]+ KiB) of device memory$",
        str(refused.value),
    )
    assert said, str(refused.value)
    needed = parse_bytes(said[1])
    # Four digits are said, and so much is enough.
    with Engine.from_pretrained(
        speaking, device="cpu", device_memory=needed + needed // 1000, max_context=16
    ):
        pass
    with pytest.raises(DoesNotFitError):
        Engine.from_pretrained(
            speaking, device="cpu", device_memory=needed - needed // 1000, max_context=16
        )


def test_a_budget_that_does_not_fit_is_said_where_the_rest_does(speaking) -> None:
    with pytest.raises(DoesNotFitError, match="it fits without the budget of 400 tokens"):
        Engine.from_pretrained(
            speaking, device="cpu", device_memory=2_200_000, max_context=400, budget=400
        )


def test_no_budget_makes_layers_stream_where_a_smaller_one_does_not() -> None:
    """Without a budget asked for: a streamed layer costs more in a pass than fewer tokens save."""
    asks = wanted("llama3.1-8b", 131072)
    budgets, smaller = asks.method.budgets, 0
    for quarters in range(4 * 16, 4 * 24):
        memory = quarters * GIB // 4
        fitted = fit_device(asks, memory)
        streamed = {}
        for budget in budgets:
            with suppress(DoesNotFitError):
                streamed[budget] = place(asks.requirements(budget), memory).streamed_layers
        resident = [budget for budget, layers in streamed.items() if not layers]
        if resident:
            assert (fitted.budget, fitted.memory.placement.streamed_layers) == (max(resident), ())
            smaller += max(resident) < max(streamed)
    assert smaller, "somewhere the largest budget would make layers stream"
