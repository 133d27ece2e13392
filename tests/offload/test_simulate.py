"""The virtual clock keeps the conveyor's rules, and times what the emulated link takes."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from bench.plot_trace import read_trace
from triforce_offload.conveyor import Conveyor, Transfer
from triforce_offload.link.emulated import EmulatedLink
from triforce_offload.link.trace import write_spans
from triforce_offload.plan.simulate import Work, simulate, spans
from triforce_offload.schedule import Crossing, Kind, KVPlaces, Places, pass_schedule
from triforce_offload.weights.locations import Source


def random_schedule(seed: int) -> tuple[list[Crossing], list[Work], dict[str, int]]:
    rng = random.Random(seed)
    slots = {"weights": rng.randint(1, 3), "kv": rng.randint(1, 4)}
    crossings, works = [], []
    for layer in range(rng.randint(1, 6)):
        held = ()
        if rng.random() < 0.5:
            held = (len(crossings),)
            crossings.append(Crossing("weights", layer, None, rng.randint(1, 9) * 100))
        works.append(Work("before", rng.random(), len(crossings), (), layer))
        for block in range(rng.randint(0, 5)):
            crossings.append(Crossing("kv", layer, block, rng.randint(1, 9) * 100))
            works.append(Work("block", rng.random(), len(crossings), (len(crossings) - 1,), layer))
        works.append(Work("after", rng.random(), 0, held, layer))
    return crossings, works, slots


@pytest.mark.parametrize("seed", range(200))
def test_the_rules_of_the_conveyor_hold(seed: int) -> None:
    crossings, works, slots = random_schedule(seed)
    rate = 1000.0
    timeline = simulate(crossings, works, slots, rate, 0.25)
    assert len(timeline.crossings) == len(crossings)
    for (began, ended), crossing in zip(timeline.crossings, crossings, strict=True):
        assert ended - began == pytest.approx(crossing.nbytes / rate)
        assert began >= 0.25
    for (_, before), (after, _) in itertools.pairwise(timeline.crossings):
        assert after >= before  # one link, in order
    for (_, before), (after, _) in itertools.pairwise(timeline.works):
        assert after >= before
    released = {}
    for work, (began, ended) in zip(works, timeline.works, strict=True):
        assert all(came <= began for _, came in timeline.crossings[: work.needs])
        released.update(dict.fromkeys(work.releases, ended))
    for ring, count in slots.items():
        members = [i for i, crossing in enumerate(crossings) if crossing.ring == ring]
        for earlier, later in zip(members, members[count:], strict=False):
            assert timeline.crossings[later][0] >= released[earlier]
    # Nothing waits without a reason: each copy starts with what it waited for.
    for index, (began, _) in enumerate(timeline.crossings):
        reasons = {0.25, timeline.crossings[index - 1][1] if index else 0.25, *released.values()}
        assert any(began == pytest.approx(reason) for reason in reasons)


def test_floor_and_compute_bound_the_time() -> None:
    for seed in range(50):
        crossings, works, slots = random_schedule(seed)
        seconds = simulate(crossings, works, slots, 1000.0).seconds
        assert seconds >= sum(crossing.nbytes for crossing in crossings) / 1000.0 - 1e-9
        assert seconds >= sum(work.seconds for work in works) - 1e-9


def test_a_schedule_that_holds_all_slots_is_refused() -> None:
    crossings = [Crossing("kv", 0, 0, 10), Crossing("kv", 0, 1, 10)]
    with pytest.raises(ValueError, match="slot of kv"):
        simulate(crossings, [Work("both", 1.0, 2, (0, 1))], {"kv": 1}, 10.0)


def test_the_emulated_link_takes_what_the_clock_says() -> None:
    """One schedule, two executors: the same conveyor over a paced link, compute that sleeps."""
    rate, size, count = 20e6, 200_000, 12
    seconds = [0.002, 0.02, 0.002, 0.002, 0.03, 0.002] * 2
    crossings = [Crossing("kv", 0, i, size) for i in range(count)]
    works = [Work("layer", s, i + 1, (i,)) for i, s in enumerate(seconds)]
    predicted = simulate(crossings, works, {"kv": 2}, rate).seconds
    link = EmulatedLink(rate)
    try:
        slots = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        source = torch.zeros(size, dtype=torch.uint8)
        conveyor = Conveyor(link, {"kv": slots})
        began = time.perf_counter()
        conveyor.start(Transfer(i, "kv", Source(source)) for i in range(count))
        for i, wait in enumerate(seconds):
            conveyor.acquire(i)
            time.sleep(wait)
            conveyor.release(i)
        measured = time.perf_counter() - began
    finally:
        link.close()
    assert predicted <= measured * 1.001  # nothing is faster than the clock; machines may be slower


def test_a_trace_of_it_says_that_it_is_simulated(tmp_path) -> None:
    crossings, works, slots = random_schedule(3)
    timeline = simulate(crossings, works, slots, 1000.0)
    told = spans(crossings, works, timeline, 1.0)
    assert len(told) == len(crossings) + len(works)
    assert all(span.args["simulated"] for span in told)
    path = tmp_path / "trace.json"
    write_spans([told], path, {"simulated": True})
    tracks = read_trace(path)
    assert [len(tracks[name]) for name in ("copy in", "compute")] == [len(crossings), len(works)]
    assert tracks["compute"][-1].ended == pytest.approx(timeline.seconds, abs=1e-5)


@pytest.mark.parametrize("seed", range(50))
def test_a_schedule_brings_each_streamed_byte_once_before_it_is_computed_with(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 5)
    streamed = {layer for layer in range(layers) if rng.random() < 0.5}
    blocks, resident = ([rng.randint(0, 4) for _ in range(layers)] for _ in range(2))
    sizes = [rng.randint(1, 9) for _ in range(layers)]
    schedule = pass_schedule(
        Places(
            [size if layer in streamed else 0 for layer, size in enumerate(sizes)],
            [KVPlaces(blocks, resident)],
            7,
            range(layers),
        )
    )
    expected = []
    for layer in range(layers):
        if layer in streamed:
            expected.append(Crossing("weights", layer, None, sizes[layer]))
        expected += [
            Crossing("kv", layer, block, 7) for block in range(resident[layer], blocks[layer])
        ]
    assert schedule.crossings == expected
    assert len({crossing.key for crossing in expected}) == len(expected)
    # Each slot is given back once, after the last piece that reads it, and each block is seen once.
    released = [index for piece in schedule.pieces for index in piece.releases]
    assert sorted(released) == list(range(len(expected)))
    for layer in range(layers):
        pieces = [piece for piece in schedule.pieces if piece.layer == layer]
        assert [pieces[0].kind, pieces[-1].kind] == [Kind.BEFORE, Kind.AFTER]
        assert sum(piece.blocks for piece in pieces) == blocks[layer]
    for piece in schedule.pieces:
        assert all(index < piece.needs for index in piece.releases) or piece.kind is Kind.AFTER
