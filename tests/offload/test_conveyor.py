"""F1: on simulated streams that an adversary interleaves, nothing is read before it is there and
nothing is overwritten in use; and each single wait is needed, since removing it is caught.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest
import torch

from triforce_offload.conveyor import Conveyor, Transfer
from triforce_offload.errors import LinkError
from triforce_offload.link.link import LinkCounters
from triforce_offload.weights.locations import Source

SCHEDULES = int(os.environ.get("TRIFORCE_SCHEDULES", "2000"))
NOTHING = 255
SLOT_BYTES = 4


class Event:
    def __init__(self) -> None:
        self.happened = False


class SimulatedLink:
    """Three streams of queued work, as on a GPU: the host only enqueues, an adversary executes.

    A copy is two steps: first the target is spoilt, later it holds the source. Work on the compute
    stream is enqueued by `launch`.
    """

    emulated = True
    bandwidth = None

    def __init__(self, adversary: random.Random) -> None:
        self._adversary = adversary
        self._streams: dict[str, deque[Callable[[], bool]]] = {
            name: deque() for name in ("compute", "in", "out")
        }

    def to_device(
        self, device: torch.Tensor, host: torch.Tensor, after: Sequence[Event], what=None
    ) -> Event:
        return self._copy("in", device, host, after)

    def to_host(
        self, host: torch.Tensor, device: torch.Tensor, after: Sequence[Event], what=None
    ) -> Event:
        return self._copy("out", host, device, after)

    def record(self) -> Event:
        event = Event()
        self._enqueue("compute", lambda: setattr(event, "happened", True))
        return event

    def wait(self, event: Event) -> None:
        self._wait("compute", event)

    def launch(self, work: Callable[[], None]) -> None:
        self._enqueue("compute", work)

    def counters(self) -> LinkCounters:
        return LinkCounters()

    def synchronize(self) -> None:
        while any(self._streams.values()):
            self._step()

    def close(self) -> None:
        self.synchronize()

    def some_steps(self) -> None:
        """The adversary may let streams run ahead between any two calls of the host."""
        for _ in range(self._adversary.choice((0, 0, 1, 3, 10))):
            self._step()

    def _copy(self, stream, target, source, after) -> Event:
        for event in after:
            self._wait(stream, event)
        done = Event()
        self._enqueue(stream, lambda: target.fill_(NOTHING))
        self._enqueue(stream, lambda: target.copy_(source))
        self._enqueue(stream, lambda: setattr(done, "happened", True))
        self.some_steps()
        return done

    def _wait(self, stream: str, event: Event) -> None:
        self._streams[stream].append(lambda: event.happened)

    def _enqueue(self, stream: str, work: Callable[[], object]) -> None:
        def run() -> bool:
            work()
            return True

        self._streams[stream].append(run)

    def _step(self) -> None:
        names = [name for name, queue in self._streams.items() if queue]
        self._adversary.shuffle(names)
        for name in names:
            if self._streams[name][0]():
                self._streams[name].popleft()
                return
        assert not names, "deadlock: every stream waits for another"


class NoWaitForCopy(SimulatedLink):
    def wait(self, event: Event) -> None:
        pass


class NoWaitForFirst(SimulatedLink):
    """Drops the first event of `after`: that of the slot's last reader, where it has one."""

    def to_device(self, device, host, after, what=None):
        return super().to_device(device, host, after[1:])


class NoWaitForSource(SimulatedLink):
    """Drops the last event of `after`: that of the source's own writing, where it has one."""

    def to_device(self, device, host, after, what=None):
        return super().to_device(device, host, after[:-1])


class EarlyRelease(Conveyor):
    """Records the release as if it had happened at the acquire."""

    def acquire(self, key):
        buffer = super().acquire(key)
        self._early = self._link.record()
        return buffer

    def release(self, key):
        held = self._acquired.pop(key)
        held.slot.released = self._early
        self._free[held.transfer.ring].append(held.slot)
        self._issue()


class Fault(AssertionError):
    """A read saw bytes that are not the ones asked for."""


def run_random_passes(
    seed: int,
    make_link: type[SimulatedLink] = SimulatedLink,
    make_conveyor: type[Conveyor] = Conveyor,
) -> None:
    """Some passes over random layers: a weight transfer held while its KV blocks go through.

    Raises Fault if any read, at its begin or its end, sees other bytes than its own.
    """
    choose = random.Random(seed)
    link = make_link(choose)
    slots = {
        ring: [
            torch.full((SLOT_BYTES,), NOTHING, dtype=torch.uint8)
            for _ in range(choose.randint(1, 3))
        ]
        for ring in ("weights", "kv")
    }
    conveyor = make_conveyor(link, slots)
    content = 0

    def read(buffer: torch.Tensor, expected: int) -> None:
        def look() -> None:
            if not bool((buffer == expected).all()):
                raise Fault

        link.launch(look)
        link.some_steps()
        link.launch(look)

    for _ in range(choose.randint(1, 3)):
        schedule: list[tuple[Transfer, int]] = []
        layers = []
        for layer in range(choose.randint(1, 4)):
            mine = [("weights", layer, 0)] * choose.randint(0, 1)
            mine += [("kv", layer, block) for block in range(choose.randint(0, 4))]
            layers.append(mine)
            for key in mine:
                content = (content + 1) % NOTHING
                source = torch.full((choose.randint(1, SLOT_BYTES),), NOTHING, dtype=torch.uint8)
                if choose.random() < 0.3:  # still being written out, as a fresh KV block is
                    staged = torch.full_like(source, content)
                    after = (link.to_host(source, staged, (link.record(),)),)
                else:
                    source.fill_(content)
                    after = ()
                schedule.append((Transfer(key, key[0], Source(source, after)), content))
        expected = {transfer.key: value for transfer, value in schedule}
        conveyor.start(transfer for transfer, _ in schedule)
        if choose.random() < 0.2:  # a pass that is cut off somewhere
            cut = choose.randint(0, len(schedule))
            for transfer, value in schedule[:cut]:
                buffer = conveyor.acquire(transfer.key)
                read(buffer, value)
                if choose.random() < 0.8:
                    conveyor.release(transfer.key)
                else:
                    break
            conveyor.cancel()
            continue
        for mine in layers:
            held = [key for key in mine if key[0] == "weights"]
            weights = [(conveyor.acquire(key), expected[key]) for key in held]
            for key in mine[len(held) :]:
                read(conveyor.acquire(key), expected[key])
                conveyor.release(key)
            for buffer, value in weights:
                read(buffer, value)
            for key in held:
                conveyor.release(key)
    link.synchronize()


def is_faulty(seed: int, **mutant: type) -> bool:
    try:
        run_random_passes(seed, **mutant)
    except Fault:
        return True
    return False


def test_no_early_read_and_no_overwrite_in_use() -> None:
    assert [seed for seed in range(SCHEDULES) if is_faulty(seed)] == []


@pytest.mark.parametrize(
    "mutant",
    [
        {"make_link": NoWaitForCopy},
        {"make_link": NoWaitForFirst},
        {"make_link": NoWaitForSource},
        {"make_conveyor": EarlyRelease},
    ],
    ids=lambda mutant: next(iter(mutant.values())).__name__,
)
def test_removing_any_wait_is_caught(mutant) -> None:
    assert any(is_faulty(seed, **mutant) for seed in range(200))


def test_out_of_order_use_is_refused() -> None:
    link = SimulatedLink(random.Random(0))
    slot = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
    conveyor = Conveyor(link, {"kv": [slot]})
    source = Source(torch.zeros(SLOT_BYTES, dtype=torch.uint8))
    conveyor.start([Transfer(0, "kv", source), Transfer(1, "kv", source)])
    with pytest.raises(RuntimeError, match="holds 0 next, 1 was asked for"):
        conveyor.acquire(1)
    with pytest.raises(RuntimeError, match="under way"):
        conveyor.start([])


def test_every_slot_is_back_after_a_failed_copy() -> None:
    """F2 in small: whichever copy fails, the error is typed and the next pass is right."""

    class FailingLink(SimulatedLink):
        def wait(self, event: Event) -> None:
            self.waited += 1
            if self.waited == self.fails_at:
                raise LinkError("a transfer failed: planted")
            super().wait(event)

    for fails_at in range(1, 7):
        link = FailingLink(random.Random(0))
        link.waited, link.fails_at = 0, fails_at
        slots = [torch.zeros(SLOT_BYTES, dtype=torch.uint8) for _ in range(2)]
        conveyor = Conveyor(link, {"kv": slots})
        sources = [torch.full((SLOT_BYTES,), i, dtype=torch.uint8) for i in range(6)]
        schedule = [Transfer(i, "kv", Source(source)) for i, source in enumerate(sources)]
        seen = []

        def run_pass() -> None:
            conveyor.start(schedule)  # noqa: B023
            for transfer in schedule:  # noqa: B023
                buffer = conveyor.acquire(transfer.key)  # noqa: B023
                link.synchronize()  # noqa: B023
                seen.append(buffer.tolist())  # noqa: B023
                conveyor.release(transfer.key)  # noqa: B023

        with pytest.raises(LinkError):
            run_pass()
        conveyor.cancel()
        seen.clear()
        run_pass()
        assert seen == [source.tolist() for source in sources]
