"""The KV store: one owner of the length, and the same contents wherever blocks live."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from offload.conveyor import Conveyor
from offload.errors import DoesNotFitError, LinkError
from offload.kv.attend import KVPass, PrefillPass
from offload.kv.store import RING, KVShape, KVStore
from offload.link.link import LinkCounters
from offload.memory.device import DeviceMemory
from offload.memory.host import HostBlocks, HostMemory

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype=torch.float32)
MAX_PASS = 6


class LateLink:
    """Makes each copy at the last moment that its events allow: when somebody waits for it.

    Until then a target on the device reads as NaN, so a missing wait anywhere shows.
    """

    emulated = True
    bandwidth = None

    class Copy:
        def __init__(self, target, source, after) -> None:
            self.parts = (target, source, after)

        def run(self) -> None:
            if self.parts is not None:
                (target, source, after), self.parts = self.parts, None
                for event in after:
                    event.run()
                target.copy_(source)

    class Past:
        def run(self) -> None:
            pass

    def __init__(self) -> None:
        self._copies: list[LateLink.Copy] = []

    def to_device(
        self, device: torch.Tensor, host: torch.Tensor, after: Sequence, what=None
    ) -> Copy:
        device.fill_(255)
        return self._add(device, host, after)

    def to_host(self, host: torch.Tensor, device: torch.Tensor, after: Sequence, what=None) -> Copy:
        host.fill_(255)
        return self._add(host, device, after)

    def record(self) -> Past:
        return self.Past()

    def wait(self, event) -> None:
        event.run()

    def counters(self) -> LinkCounters:
        return LinkCounters()

    def synchronize(self) -> None:
        for copy in self._copies:
            copy.run()

    def close(self) -> None:
        self.synchronize()

    def _add(self, target, source, after) -> Copy:
        self._copies.append(self.Copy(target, source, tuple(after)))
        return self._copies[-1]


def make_store(
    resident: Sequence[int] = (0, 0), link=None, staging: int = 1, slots: int = 1
) -> tuple[KVStore, Conveyor]:
    link = link or LateLink()
    memory = DeviceMemory(torch.device("cpu"), 1 << 20)

    def buffers(count: int) -> list[torch.Tensor]:
        return [torch.zeros(SHAPE.block_bytes, dtype=torch.uint8) for _ in range(count)]

    blocks = HostBlocks(SHAPE.block_bytes, HostMemory())
    store = KVStore(SHAPE, MAX_PASS, resident, memory, blocks, link, buffers(staging))
    return store, Conveyor(link, {RING: buffers(slots)})


def kv_of(tokens: Sequence[int], layer: int) -> torch.Tensor:
    """Recognisable KV: [2, kv_heads, tokens, head_dim]."""
    base = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None] * 10 + layer
    offsets = torch.arange(2 * SHAPE.kv_heads * SHAPE.head_dim).view(2, SHAPE.kv_heads, 1, -1)
    return base + offsets / 1000


def append(store: KVStore, tokens: Sequence[int]) -> None:
    for layer in range(SHAPE.layers):
        put(store, layer, *kv_of(tokens, layer))


def put(cache, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Puts keys and values [kv_heads, tokens, head_dim] where the cache has room for them."""
    room = cache.room(layer, key.shape[1])
    room.key[:, room.start : room.start + key.shape[1]] = key
    room.value[:, room.start : room.start + key.shape[1]] = value


def contents(store: KVStore, conveyor: Conveyor) -> list[torch.Tensor]:
    """Each layer's KV as a pass would see it."""
    conveyor.start(t for layer in range(SHAPE.layers) for t in store.transfers(layer))
    layers = []
    for layer in range(SHAPE.layers):
        parts = []
        for block in store.layer_blocks(layer):
            if block.resident is not None:
                parts.append(SHAPE.view(block.buffer))
                continue
            parts.append(SHAPE.view(conveyor.acquire(block.key)).clone())
            conveyor.release(block.key)
        layers.append(torch.cat([*parts, store.tail(layer)], 2))
    return layers


@pytest.mark.parametrize("resident", [(0, 0), (2, 1), (9, 9)])
@pytest.mark.parametrize("staging", [1, 2])
def test_random_passes_leave_exactly_what_was_committed(resident, staging) -> None:
    """Appends of any length, any part of them accepted, across many block borders."""
    for seed in range(15):
        choose = random.Random(seed)
        store, conveyor = make_store(resident, staging=staging, slots=choose.randint(1, 3))
        kept: list[int] = []
        if choose.random() < 0.7:
            kept = list(range(choose.randint(1, 11)))
            for layer in range(SHAPE.layers):
                for so_far in range(choose.randint(1, 4), len(kept), choose.randint(1, 5)):
                    # What is not there yet is never read.
                    part = kv_of(kept, layer)
                    part[:, :, so_far:] = float("nan")
                    store.fill(layer, part, so_far)
                store.fill(layer, kv_of(kept, layer))
            store.commit_fill(len(kept))
        fresh = 100
        while len(kept) < 36:
            drafted = list(range(fresh, fresh + choose.randint(1, MAX_PASS)))
            fresh += len(drafted)
            append(store, drafted)
            for layer, seen in enumerate(contents(store, conveyor)):
                assert torch.equal(seen, kv_of(kept + drafted, layer))
            accepted = choose.randint(0, len(drafted))
            store.commit(accepted)
            kept += drafted[:accepted]
            assert store.length == len(kept)
            assert 0 <= store.tail_length < SHAPE.block_tokens
        store.close()


class NoWaitForStaging(LateLink):
    """A staging slot is taken again while its block is still on its way out."""

    def wait(self, event) -> None:
        if not (isinstance(event, self.Copy) and event.parts and event.parts[0].dtype):
            return
        if event.parts[0].data_ptr() not in self.hosts:
            super().wait(event)

    def to_host(self, host, device, after, what=None):
        self.hosts = getattr(self, "hosts", set()) | {host.data_ptr()}
        return super().to_host(host, device, after, what)


class NoWaitForWritten(LateLink):
    """A block is brought back before it has arrived on the host."""

    def to_device(self, device, host, after, what=None):
        return super().to_device(device, host, ())


@pytest.mark.parametrize("mutant", [NoWaitForStaging, NoWaitForWritten])
def test_removing_a_wait_of_the_way_out_is_caught(mutant) -> None:
    store, conveyor = make_store(link=mutant())
    tokens = list(range(14))
    for layer in range(SHAPE.layers):
        store.fill(layer, kv_of(tokens, layer))
    store.commit_fill(len(tokens))
    seen = contents(store, conveyor)
    assert not all(torch.equal(s, kv_of(tokens, layer)) for layer, s in enumerate(seen))


def test_a_commit_or_append_that_cannot_be_is_refused_before_any_change() -> None:
    store, _ = make_store()
    with pytest.raises(RuntimeError, match="commit of 1 tokens, the pass holds 0"):
        store.commit(1)
    append(store, [1, 2, 3])
    with pytest.raises(RuntimeError, match="commit of 4"):
        store.commit(4)
    with pytest.raises(RuntimeError, match="a pass of 7 tokens, the tail takes 6"):
        append(store, [4, 5, 6, 7])
    store.commit(3)
    assert store.length == 3
    with pytest.raises(RuntimeError, match="which is full"):
        store.fill(0, kv_of([1], 0))


def test_passes_over_one_store_attend_as_one_prefill_would() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, tokens = 4, 23
    query = torch.randn(heads, tokens, 8, generator=generator)
    key, value = torch.randn(2, SHAPE.kv_heads, tokens, 8, generator=generator)
    mask = torch.full((tokens, tokens), float("-inf")).triu(1)
    scores = query @ key.repeat_interleave(2, 0).transpose(1, 2) * 8**-0.5 + mask
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 0)

    store, conveyor = make_store((1, 0))
    gathered = torch.empty(10 * SHAPE.token_bytes, dtype=torch.uint8)
    prefill = PrefillPass(store, 10, gathered)
    for layer in range(SHAPE.layers):
        for part in (slice(0, 4), slice(4, 8), slice(8, 10)):
            put(prefill, layer, key[:, part], value[:, part])
            out = prefill.attend(layer, query[:, part])
            torch.testing.assert_close(out, expected[:, part], rtol=0, atol=2e-6)
    store.commit_fill(10)
    start = 10
    for count in (1, 6, 3, 1, 2):
        conveyor.start(t for layer in range(SHAPE.layers) for t in store.transfers(layer))
        kv_pass = KVPass(store, conveyor)
        part = slice(start, start + count)
        for layer in range(SHAPE.layers):
            put(kv_pass, layer, key[:, part], value[:, part])
            out = kv_pass.attend(layer, query[:, part])
            torch.testing.assert_close(out, expected[:, part], rtol=0, atol=2e-6)
        store.commit(count)
        start += count


def test_a_store_gives_everything_back() -> None:
    memory = DeviceMemory(torch.device("cpu"), 1 << 20)
    blocks = HostBlocks(SHAPE.block_bytes, HostMemory())
    for _ in range(3):
        store = KVStore(
            SHAPE,
            MAX_PASS,
            (1, 0),
            memory,
            blocks,
            LateLink(),
            [torch.zeros(SHAPE.block_bytes, dtype=torch.uint8)],
        )
        for layer in range(SHAPE.layers):
            store.fill(layer, kv_of(range(20), layer))
        store.commit_fill(20)
        taken = blocks.nbytes
        store.close()
        assert memory.available_bytes == memory.limit_bytes
    assert blocks.nbytes == taken, "host blocks of ended requests are used again"


def test_a_store_gives_everything_back_when_the_link_has_failed() -> None:
    class Broken(LateLink):
        def synchronize(self) -> None:
            raise LinkError("planted")

    memory = DeviceMemory(torch.device("cpu"), 1 << 20)
    blocks = HostBlocks(SHAPE.block_bytes, HostMemory())
    staging = [torch.zeros(SHAPE.block_bytes, dtype=torch.uint8)]
    for _ in range(2):
        store = KVStore(SHAPE, MAX_PASS, (1, 0), memory, blocks, Broken(), staging)
        for layer in range(SHAPE.layers):
            store.fill(layer, kv_of(range(20), layer))
        taken = blocks.nbytes
        store.close()
        assert memory.available_bytes == memory.limit_bytes
    assert blocks.nbytes == taken


def test_a_store_over_the_budget_is_refused() -> None:
    memory = DeviceMemory(torch.device("cpu"), 100)
    with pytest.raises(DoesNotFitError, match="KV tail"):
        KVStore(SHAPE, MAX_PASS, (0, 0), memory, None, LateLink(), [])
    assert memory.available_bytes == 100
    memory = DeviceMemory(torch.device("cpu"), SHAPE.tail_bytes(MAX_PASS) + 10)
    with pytest.raises(DoesNotFitError, match="resident KV"):
        KVStore(SHAPE, MAX_PASS, (1, 0), memory, None, LateLink(), [])
    assert memory.available_bytes == memory.limit_bytes
