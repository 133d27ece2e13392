"""The virtual clock keeps the conveyor's rules, and times what the emulated link takes."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from trace_file import read_trace

from offload.conveyor import Conveyor, Transfer
from offload.link.emulated import EmulatedLink
from offload.link.trace import write_spans
from offload.simulate import Copy, Work, simulate, spans


def random_schedule(seed: int) -> tuple[list[Copy], list[Work], dict[str, int]]:
    rng = random.Random(seed)
    slots = {"weights": rng.randint(1, 3), "kv": rng.randint(1, 4)}
    copies, works = [], []
    for layer in range(rng.randint(1, 6)):
        held = ()
        if rng.random() < 0.5:
            held = (len(copies),)
            copies.append(Copy("weights", layer, rng.randint(1, 9) * 100))
        works.append(Work("before", rng.random(), len(copies), (), layer))
        for block in range(rng.randint(0, 5)):
            copies.append(Copy("kv", layer, rng.randint(1, 9) * 100, block))
            works.append(Work("block", rng.random(), len(copies), (len(copies) - 1,), layer))
        works.append(Work("after", rng.random(), 0, held, layer))
    return copies, works, slots


@pytest.mark.parametrize("seed", range(200))
def test_the_rules_of_the_conveyor_hold(seed: int) -> None:
    copies, works, slots = random_schedule(seed)
    rate = 1000.0
    timeline = simulate(copies, works, slots, rate, 0.25)
    assert len(timeline.copies) == len(copies)
    for (began, ended), copy in zip(timeline.copies, copies, strict=True):
        assert ended - began == pytest.approx(copy.nbytes / rate)
        assert began >= 0.25
    for (_, before), (after, _) in itertools.pairwise(timeline.copies):
        assert after >= before  # one link, in order
    for (_, before), (after, _) in itertools.pairwise(timeline.works):
        assert after >= before
    released = {}
    for work, (began, ended) in zip(works, timeline.works, strict=True):
        assert all(came <= began for _, came in timeline.copies[: work.needs])
        released.update(dict.fromkeys(work.releases, ended))
    for ring, count in slots.items():
        members = [i for i, copy in enumerate(copies) if copy.ring == ring]
        for earlier, later in zip(members, members[count:], strict=False):
            assert timeline.copies[later][0] >= released[earlier]
    # Nothing waits without a reason: each copy starts with what it waited for.
    for index, (began, _) in enumerate(timeline.copies):
        reasons = {0.25, timeline.copies[index - 1][1] if index else 0.25, *released.values()}
        assert any(began == pytest.approx(reason) for reason in reasons)


def test_floor_and_compute_bound_the_time() -> None:
    for seed in range(50):
        copies, works, slots = random_schedule(seed)
        seconds = simulate(copies, works, slots, 1000.0).seconds
        assert seconds >= sum(copy.nbytes for copy in copies) / 1000.0 - 1e-9
        assert seconds >= sum(work.seconds for work in works) - 1e-9


def test_a_schedule_that_holds_all_slots_is_refused() -> None:
    copies = [Copy("kv", 0, 10), Copy("kv", 0, 10)]
    with pytest.raises(ValueError, match="slot of kv"):
        simulate(copies, [Work("both", 1.0, 2, (0, 1))], {"kv": 1}, 10.0)


def test_the_emulated_link_takes_what_the_clock_says() -> None:
    """One schedule, two executors: the same conveyor over a paced link, compute that sleeps."""
    rate, size, count = 20e6, 200_000, 12
    seconds = [0.002, 0.02, 0.002, 0.002, 0.03, 0.002] * 2
    copies = [Copy("kv", 0, size, i) for i in range(count)]
    works = [Work("layer", s, i + 1, (i,)) for i, s in enumerate(seconds)]
    predicted = simulate(copies, works, {"kv": 2}, rate).seconds
    link = EmulatedLink(rate)
    try:
        slots = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        source = torch.zeros(size, dtype=torch.uint8)
        conveyor = Conveyor(link, {"kv": slots})
        began = time.perf_counter()
        conveyor.start(Transfer(i, "kv", source) for i in range(count))
        for i, wait in enumerate(seconds):
            conveyor.acquire(i)
            time.sleep(wait)
            conveyor.release(i)
        measured = time.perf_counter() - began
    finally:
        link.close()
    assert predicted <= measured * 1.001  # nothing is faster than the clock; machines may be slower


def test_a_trace_of_it_says_that_it_is_simulated(tmp_path) -> None:
    copies, works, slots = random_schedule(3)
    timeline = simulate(copies, works, slots, 1000.0)
    told = spans(copies, works, timeline, 1.0)
    assert len(told) == len(copies) + len(works)
    assert all(span.args["simulated"] for span in told)
    path = tmp_path / "trace.json"
    write_spans(told, path, {"simulated": True})
    tracks = read_trace(path)
    assert [len(tracks[name]) for name in ("copy in", "compute")] == [len(copies), len(works)]
    assert tracks["compute"][-1].ended == pytest.approx(timeline.seconds, abs=1e-5)
