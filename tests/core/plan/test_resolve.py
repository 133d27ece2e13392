"""What an engine chooses on a card whose rates are known is what `triforce plan` chooses for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch

from triforce_core.loading import devices
from triforce_core.model.checkpoints.mtp import mtp_config
from triforce_core.model.known.shapes import read_model, read_shape
from triforce_core.model.sharing.share import Share, mlp_unit
from triforce_core.model.tensors import drafter_layouts
from triforce_core.plan import by_time
from triforce_core.plan.by_time import Whole
from triforce_core.plan.choice import Choice
from triforce_core.plan.fitting import Resolved
from triforce_core.plan.formats import with_asked_formats
from triforce_core.plan.machine import Device, Room
from triforce_core.plan.resolve import resolve
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.search import choose
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import EngineConfig
from triforce_kernels.dispatch import TRITON
from triforce_offload.errors import DoesNotFitError
from triforce_offload.machine.processor import ProcessorRates
from triforce_offload.machine.profiles import Hardware, known, named
from triforce_offload.memory.available import LIBRARY_BYTES
from triforce_offload.ranks import Alone
from triforce_offload.weights.formats import DTYPES

GIB = 1 << 30
GPU = Device(gpu=True, kernels=True, copy_bytes=16 << 20, graphs=True, gathers_through_host=False)


def dense(name: str) -> list[tuple[int, None]]:
    return [(1, None)]


def resolved(
    shape: str,
    context: int,
    card: str = "rtx4090",
    hardware: Hardware | None = None,
    device: Device = GPU,
    memory: int | None = None,
    **fields: object,
) -> Resolved:
    """What an engine chooses in bfloat16 on a card that has nothing else to do."""
    config = EngineConfig().changed(dtype="bfloat16", **fields)
    room = Room(memory or named(card).memory_bytes - LIBRARY_BYTES, 512 * GIB)
    sizes = ModelSizes(read_shape(shape), DTYPES["bfloat16"], context, config.method, device=device)
    sizes = with_asked_formats(sizes, config, dense, room)
    return resolve(sizes, config, room, dense, hardware=hardware)


def planned(shape: str, context: int, card: str = "rtx4090"):
    hardware = replace(named(card), host_memory_bytes=512 * GIB)
    case = Case(
        read_shape(shape),
        hardware,
        context,
        256,
        DTYPES["bfloat16"],
        auto=frozenset({"weights", "kv"}),
    )
    return choose(case)


@pytest.mark.first
@pytest.mark.parametrize(
    ("shape", "context", "card"),
    [
        ("llama3.1-8b", 131072, "rtx4090"),
        ("llama3.1-8b", 4096, "rtx4090"),
        ("llama2-7b-128k", 131072, "rtx4090"),
        ("qwen2.5-32b", 32768, "rtx4090"),
        ("seed-oss-36b", 32768, "rtx4090"),
        ("qwen3-14b", 40960, "rtx5090"),
        ("llama3.1-8b", 131072, "h100"),
    ],
)
def test_an_engine_keeps_everything_as_the_plan_says(shape: str, context: int, card: str) -> None:
    best, ours = planned(shape, context, card), resolved(shape, context, card, named(card))
    assert ours.weights == best.case.weights
    assert ours.sizes.kv_split == best.case.split_kv
    # Lengths that are learned take more workspace: one halving less of the cache may fit.
    assert best.plan.budget in (ours.budget, 2 * ours.budget)
    assert ours.memory.device_bytes <= named(card).memory_bytes - LIBRARY_BYTES
    assert ours.sizes.method.budget is None, "nobody asked for it: it may be dropped"


def test_split_formats_are_not_taken_where_decoding_them_takes_longer() -> None:
    """A card with fast memory and slow integers; the rule by bytes splits whatever streams."""
    slow = replace(named("h100"), integer_ops_per_second=1e11)
    by_rule = resolved("llama3.1-70b", 8192, "h100")
    by_time = resolved("llama3.1-70b", 8192, "h100", slow)
    assert by_rule.sizes.weights.split
    assert not by_time.sizes.weights.split


def test_what_was_asked_for_stays() -> None:
    for fields in ({"budget": 1024}, {"kv": "dense"}, {"weights": "dense"}, {"draft_kv": "exact"}):
        ours = resolved("llama3.1-8b", 131072, hardware=named("rtx4090"), **fields)
        assert ours.budget == fields.get("budget", ours.budget)
        assert not (ours.sizes.kv_split and "kv" in fields)
        assert not (ours.sizes.weights.split and "weights" in fields)
        assert not (ours.sizes.rounds_kv and "draft_kv" in fields)
    assert (
        resolved("llama3.1-8b", 131072, hardware=named("rtx4090"), method="autoregressive").budget
        == 0
    )


@pytest.mark.first
@pytest.mark.parametrize("budget", [None, 1024])
def test_trees_that_nobody_asked_for_leave_where_they_do_not_fit(budget: int | None) -> None:
    """Whatever fits with chains fits: the retrieval level drafts trees where there is room."""
    options = {"accept": "coupled", "budget": budget, "weights": "dense", "kv": "dense"}
    trees = []
    for memory in range(1_000_000_000, 4_200_000_000, 50_000_000):
        try:
            chains = resolved("llama3.2-1b", 32768, memory=memory, tree="off", **options)
        except DoesNotFitError:
            with pytest.raises(DoesNotFitError):
                resolved("llama3.2-1b", 32768, memory=memory, **options)
            continue
        found = resolved("llama3.2-1b", 32768, memory=memory, **options)
        assert found.memory.device_bytes <= memory
        assert (found.budget > 0) == (chains.budget > 0)
        if found.budget:
            trees.append(found.sizes.method.tree == "auto")
    assert not budget or trees == sorted(trees)
    assert set(trees) == {False, True}
    with pytest.raises(DoesNotFitError):
        resolved("llama3.2-1b", 32768, memory=1_000_000_000, **{**options, "tree": 127})


def test_without_kernels_or_rates_a_rule_by_bytes_decides() -> None:
    plain = replace(GPU, kernels=False)
    by_rule = resolved("llama3.1-8b", 131072, device=plain)
    assert resolved("llama3.1-8b", 131072, hardware=named("rtx4090"), device=plain) == by_rule


def test_cards_are_known_by_the_names_of_their_drivers() -> None:
    card = known("NVIDIA GeForce RTX 4090", 2, 24e9)
    assert card == replace(named("rtx4090"), link_bytes_per_second=24e9)
    assert known("NVIDIA H100 80GB HBM3", 2, None) == named("h100")
    assert known("NVIDIA GeForce RTX 4090 (simulated)", 2, None) is None
    assert known("Quadro of nobody", 2, None) is None


@pytest.mark.parametrize("later", [True, False])
def test_ranks_try_copies_in_3_bits_together(*, later: bool) -> None:
    """One rank has no room for a retrieval level with copies in 4 bits; all ask again.

    later: whether that rank has room for copies in 3 bits
    """
    config = EngineConfig().changed(dtype="bfloat16", weights="dense")
    sizes = ModelSizes(read_shape("qwen2.5-32b"), DTYPES["bfloat16"], 8192, config.method)
    asked: list[int] = []

    class Peer(Alone):
        def least(self, number: int) -> int:
            if number in (room.device_bytes, room.host_bytes):
                return number
            asked.append(number)
            return number if later and len(asked) > 1 else 0

    room = Room(22 * GIB, 512 * GIB)
    whole = Whole(sizes.config, None, dense)
    found = resolve(sizes, config, room, dense, whole=whole, ranks=Peer())
    assert len(asked) == 2
    assert min(asked) > 0
    assert found.budget == (asked[1] if later else 0)
    assert found.sizes.method.bits_of_copies == (3 if later else 4)
    assert bool(found.memory.placement.copied_layers) == later


class _Meeting:
    """Where ranks that are threads meet, who must all do the same."""

    def __init__(self, ranks: int) -> None:
        self._brought: list[tuple[str, object]] = [("", None)] * ranks
        self._all = threading.Barrier(ranks, timeout=60)

    def together(self, rank: int, kind: str, part: object) -> list[object]:
        self._brought[rank] = kind, part
        self._all.wait()
        kinds, parts = zip(*self._brought, strict=True)
        self._all.wait()
        assert set(kinds) == {kind}
        return list(parts)


class _Peer(NamedTuple):
    """One of the ranks."""

    meeting: _Meeting
    index: int
    count: int

    def least(self, number: int) -> int:
        return min(self.meeting.together(self.index, "least", number))

    def of_first(self, message: Choice) -> Choice:
        return self.meeting.together(self.index, "of_first", message)[0]


def on_ranks(
    model: str, context: int, rooms: Sequence[Room], draft: str | None = None, **fields: object
) -> list[Resolved]:
    """What each of several ranks chooses, each with an RTX 4090. The first one has the draft model,
    if there is one.
    """
    shape, config = read_model(model), EngineConfig().changed(dtype="bfloat16", **fields)
    pieces = shape.pieces or dense
    meeting, rates = _Meeting(len(rooms)), replace(named("rtx4090"), gpus=len(rooms))
    unit = {"unit": mlp_unit(shape.config, pieces)} if shape.pieces else {}

    def rank(index: int) -> Resolved:
        share = Share.of(shape.config, index, len(rooms), **unit)
        own = share.pieces(pieces) if shape.pieces else dense
        drafter = read_shape(draft).as_drafter if draft and not index else None
        sizes = ModelSizes(
            *(share.config, DTYPES["bfloat16"], context, config.method),
            drafter=drafter,
            device=GPU,
            sequences=config.sequences,
        )
        sizes = with_asked_formats(sizes, config, own, rooms[index])
        return resolve(
            *(sizes, config, rooms[index], own),
            hardware=rates,
            whole=Whole(shape.config, drafter, pieces),
            ranks=_Peer(meeting, index, len(rooms)),
        )

    with ThreadPoolExecutor(len(rooms)) as threads:
        return list(threads.map(rank, range(len(rooms))))


def rates_of_ranks(
    name: str, links: tuple[float, ...], measure: Callable[[float], Hardware], monkeypatch
) -> list[Hardware | None]:
    """Return what `rates` gives each rank on cards of a name whose links have these rates."""
    monkeypatch.setattr(devices, "device_name", lambda device: name)
    monkeypatch.setattr(devices, "backend", lambda device: TRITON)
    monkeypatch.setattr(devices, "measured_gpu", measure)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    meeting, card = _Meeting(len(links)), torch.device("cuda", 0)

    def found(index: int) -> Hardware | None:
        ranks = SimpleNamespace(count=len(links), index=index, least=_Peer(meeting, index, 2).least)
        return devices.rates(card, torch.bfloat16, SimpleNamespace(bandwidth=links[index]), ranks)

    with ThreadPoolExecutor(len(links)) as threads:
        return list(threads.map(found, range(len(links))))


def test_the_first_rank_knows_the_card_and_the_slowest_link(monkeypatch) -> None:
    found = rates_of_ranks("NVIDIA GeForce RTX 4090", (25e9, 12e9), Mock(), monkeypatch)
    assert found == [replace(named("rtx4090"), gpus=2, link_bytes_per_second=12e9), None]


def test_a_card_that_is_not_in_the_table_is_measured(monkeypatch) -> None:
    card = replace(named("rtx4090"), name="a new card")
    measure = Mock(side_effect=lambda rate: replace(card, link_bytes_per_second=rate))
    found = rates_of_ranks("a new card", (12e9, 25e9), measure, monkeypatch)
    assert found == [replace(card, gpus=2, link_bytes_per_second=12e9), None]
    measure.assert_called_once_with(12e9)


def test_a_card_that_cannot_be_measured_has_no_rates(monkeypatch) -> None:
    measure = Mock(side_effect=RuntimeError("out of memory"))
    with pytest.warns(RuntimeWarning, match="cannot measure a full card.*: out of memory"):
        assert rates_of_ranks("a full card", (25e9,), measure, monkeypatch) == [None]


def room(less: int = 0) -> Room:
    return Room(named("rtx4090").memory_bytes - LIBRARY_BYTES - less, 256 * GIB)


SLOW_TO_PLAN = [("qwen2.5-32b", 32768), ("llama3.1-70b:Q5_K_M", 8192)]


@pytest.mark.parametrize(
    ("model", "context"),
    [
        ("llama3.1-8b", 131072),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_TO_PLAN),
    ],
)
def test_ranks_choose_what_the_planner_does(model: str, context: int) -> None:
    shape = read_model(model)
    best = choose(
        Case(
            shape.config,
            replace(named("rtx4090"), gpus=2, host_memory_bytes=512 * GIB),
            context,
            256,
            DTYPES["bfloat16"],
            pieces=shape.pieces,
            auto=frozenset({"weights", "kv"}),
        )
    )
    for found in on_ranks(model, context, (room(), room())):
        assert found.seconds_per_token == best.seconds_per_token
        assert found.sizes.weights.split == (best.case.split is not None)
        assert found.sizes.kv_split == best.case.split_kv
        assert 0.5 * best.plan.budget <= found.budget <= best.plan.budget


def test_ranks_choose_alike_with_different_memory() -> None:
    less = 12 * GIB
    first, second = on_ranks("llama3.1-8b", 131072, (room(), room(less)))
    assert first.seconds_per_token == second.seconds_per_token
    assert first.budget == second.budget
    assert first.sizes.method == second.sizes.method
    assert first.sizes.weights.split == second.sizes.weights.split
    assert second.memory.device_bytes <= room(less).device_bytes
    # The plan is made for the lesser memory; each rank keeps what it has room for.
    assert first.memory.link_bytes < second.memory.link_bytes


def test_ranks_choose_alike_where_the_first_has_a_draft_model() -> None:
    first, second = on_ranks("llama2-7b-128k", 16384, (room(), room()), draft="llama-68m")
    assert first.budget == second.budget > 0
    assert first.seconds_per_token == second.seconds_per_token


@pytest.mark.parametrize("host_compute", ["auto", 0.5])
def test_the_processor_computes_for_all_ranks(monkeypatch, host_compute: float | str) -> None:
    rates = ProcessorRates(40e9, 0.6e12)
    monkeypatch.setattr(by_time, "measure_processor", lambda: rates)
    chosen, choose = [], by_time.choose
    monkeypatch.setattr(by_time, "choose", lambda case: chosen.append(case) or choose(case))
    options = {"host_compute": host_compute}
    first, second = on_ranks("gpt-oss-120b:MXFP4", 32768, (room(), room()), **options)
    for found in (first, second):
        placement = found.memory.placement
        assert placement.processor_layers
        assert set(placement.processor_layers) <= set(placement.expert_layers)
    known = chosen[-1].hardware
    assert known.processor_bytes_per_second == 40e9
    assert known.host_flops_per_second == 1.2e12, "each rank has a part of the cores"
    slots = [found.memory.placement.expert_slots for found in (first, second)]
    assert slots == sorted(slots), "the second rank has fewer columns of each expert"
    assert bool(slots[0]) == (host_compute == "auto")


def test_several_sequences_choose_by_seconds_too(monkeypatch) -> None:
    """The CPU computes the experts that a pool lacks, and all sequences have KV and workspace."""
    monkeypatch.setattr(by_time, "measure_processor", lambda: ProcessorRates(60e9, 1.5e12))
    seconds = {}
    for sequences in (1, 4):
        (found,) = on_ranks("gpt-oss-120b:MXFP4", 8192, (room(),), sequences=sequences)
        assert found.memory.requirements.sequences == sequences
        assert found.memory.placement.expert_slots > 0
        assert found.memory.device_bytes <= room().device_bytes
        seconds[sequences] = found.seconds_per_token
    assert seconds[1] < 0.05
    assert seconds[1] < seconds[4] < 4 * seconds[1], "some experts are chosen by several of them"


def test_seconds_count_a_head_as_its_files_store_it(monkeypatch) -> None:
    """In 16 bits beside a quantised model."""
    shape, cases = read_model("qwen3.5-9b:Q4_K_M"), []
    monkeypatch.setattr(by_time, "choose", lambda case: cases.append(case) or choose(case))
    head = mtp_config(shape.config)

    def of_head(name: str) -> list[tuple[int, None]]:
        return [(head.layers[0].shapes(head.hidden)[name.split(".")[-1]][0], None)]

    config = EngineConfig().changed(dtype="bfloat16")
    sizes = ModelSizes(
        *(shape.config, DTYPES["bfloat16"], 8192, config.method),
        drafter=head,
        drafter_pieces=of_head,
        device=GPU,
    )
    sizes = with_asked_formats(sizes, config, shape.pieces, room())
    resolve(sizes, config, room(), shape.pieces, hardware=named("rtx4090"))
    (case,) = cases
    counted = case.sizes(config.method).drafter_layouts
    assert counted.nbytes == drafter_layouts(head, DTYPES["bfloat16"]).nbytes
