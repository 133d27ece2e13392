"""The KV store: one owner of the length, and the same contents wherever blocks live."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from offload.conveyor import Conveyor, Transfer
from offload.errors import DoesNotFitError, LinkError
from offload.feed import Feed
from offload.kv.attend import PassCache
from offload.kv.prefill import PrefillCache
from offload.kv.shape import KVShape
from offload.kv.store import KVStore
from offload.link.link import LinkCounters
from offload.memory.device import DeviceMemory
from offload.memory.host import HostBlocks, HostMemory
from offload.schedule import KV

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype=torch.float32)
MAX_PASS = 6


class LateLink:
    """Makes each copy at the last moment that its events, and the order of its direction, allow:
    when somebody waits for it.

    Until then a target on the device reads as NaN, so a missing wait anywhere shows.
    """

    emulated = True
    bandwidth = None

    class Copy:
        def __init__(self, before, target, source, after) -> None:
            self.before = before
            self.parts = (target, source, after)

        def run(self) -> None:
            if self.parts is not None:
                (target, source, after), self.parts = self.parts, None
                for event in (self.before, *after):
                    if event is not None:
                        event.run()
                target.copy_(source)
                self.before = None

    class Past:
        def run(self) -> None:
            pass

    def __init__(self) -> None:
        self._last: dict[str, LateLink.Copy | None] = {"in": None, "out": None}

    def to_device(
        self, device: torch.Tensor, host: torch.Tensor, after: Sequence, what=None
    ) -> Copy:
        device.fill_(255)
        return self._add("in", device, host, after)

    def to_host(self, host: torch.Tensor, device: torch.Tensor, after: Sequence, what=None) -> Copy:
        host.fill_(255)
        return self._add("out", host, device, after)

    def record(self) -> Past:
        return self.Past()

    def wait(self, event) -> None:
        event.run()

    def counters(self) -> LinkCounters:
        return LinkCounters()

    def synchronize(self) -> None:
        for copy in self._last.values():
            if copy is not None:
                copy.run()

    def close(self) -> None:
        self.synchronize()

    def _add(self, direction: str, target, source, after) -> Copy:
        copy = self.Copy(self._last[direction], target, source, tuple(after))
        self._last[direction] = copy
        return copy


def make_store(
    resident: Sequence[int] = (0, 0), link=None, staging: int = 1, slots: int = 1
) -> tuple[KVStore, Conveyor]:
    link = link or LateLink()
    memory = DeviceMemory(torch.device("cpu"), 1 << 20)

    def buffers(count: int) -> list[torch.Tensor]:
        return [torch.zeros(SHAPE.block_bytes, dtype=torch.uint8) for _ in range(count)]

    blocks = HostBlocks(SHAPE.block_bytes, HostMemory())
    store = KVStore(SHAPE, MAX_PASS, resident, memory, blocks, link, buffers(staging))
    return store, Conveyor(link, {KV: buffers(slots)})


def kv_of(tokens: Sequence[int], layer: int) -> torch.Tensor:
    """Recognisable KV: [2, kv_heads, tokens, head_dim]."""
    base = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None] * 10 + layer
    offsets = torch.arange(2 * SHAPE.kv_heads * SHAPE.head_dim).view(2, SHAPE.kv_heads, 1, -1)
    return base + offsets / 1000


def put(store: KVStore, tokens: Sequence[int]) -> None:
    """Puts the rows of a pass behind the tail of every layer, as `PassCache.attend` does."""
    end = store.tail_length + len(tokens)
    for layer in range(SHAPE.layers):
        for room, part in zip(store.room(layer, len(tokens)), kv_of(tokens, layer), strict=True):
            room[:, store.tail_length : end] = part


def fill(store: KVStore, tokens: Sequence[int], so_far: Sequence[int] = ()) -> None:
    """Stores a text that begins with what is kept; `so_far`: in parts that end there."""
    for layer in range(SHAPE.layers):
        for end in so_far:
            # What is not there yet is never read.
            part = kv_of(tokens, layer)
            part[:, :, end:] = float("nan")
            store.fill(layer, part, end, last=False)
        store.fill(layer, kv_of(tokens, layer), len(tokens), last=True)
    store.commit_fill(len(tokens))


def start(store: KVStore, conveyor: Conveyor) -> None:
    """Starts a pass's copies of what streams."""
    conveyor.start(
        Transfer((KV, layer, index), KV, home.source)
        for layer in range(SHAPE.layers)
        for index, home in enumerate(store.homes(layer))
        if home.source is not None
    )


def contents(store: KVStore, conveyor: Conveyor, rows: int = 0) -> list[torch.Tensor]:
    """Each layer's KV as a pass of so many rows would see it, which settles what it brings."""
    start(store, conveyor)
    layers = []
    for layer in range(SHAPE.layers):
        parts = []
        for index, home in enumerate(store.homes(layer)):
            with conveyor.bring((KV, layer, index), home) as block:
                parts.append(SHAPE.view(block).clone())
                store.settle(layer, index, block)
        layers.append(torch.cat([*parts, store.tail(layer, rows)], 2))
    return layers


def check(store: KVStore, conveyor: Conveyor, tokens: Sequence[int], rows: int = 0) -> None:
    for layer, seen in enumerate(contents(store, conveyor, rows)):
        assert torch.equal(seen, kv_of(tokens, layer))


@pytest.mark.parametrize("resident", [(0, 0), (2, 1), (9, 9)])
@pytest.mark.parametrize("staging", [1, 2])
def test_random_passes_leave_exactly_what_was_kept(resident, staging) -> None:
    """Passes of any length, any path of them kept, text appended and rolled back at any length,
    memory lent and taken back, across many block borders.
    """
    for seed in range(15):
        choose = random.Random(seed)
        store, conveyor = make_store(resident, staging=staging, slots=choose.randint(1, 3))
        kept: list[int] = []
        fresh = 100

        def anew(count: int) -> list[int]:
            nonlocal fresh
            fresh += count
            return list(range(fresh - count, fresh))

        for _ in range(40):
            what = choose.random()
            if what < 0.6:
                drafted = anew(choose.randint(1, MAX_PASS))
                put(store, drafted)
                check(store, conveyor, kept + drafted, len(drafted))
                path = sorted(choose.sample(range(len(drafted)), choose.randint(0, len(drafted))))
                if choose.random() < 0.5:
                    path = list(range(len(path)))
                store.keep(path)
                kept += [drafted[row] for row in path]
            elif what < 0.75:
                store.reclaim()
                kept += anew(choose.randint(1, 11))
                borders = range(store.length + 1, len(kept), choose.randint(1, 5))
                fill(store, kept, borders)
            elif what < 0.9:
                del kept[choose.randint(0, len(kept)) :]
                store.roll_back(len(kept))
            elif what < 0.95:
                store.reclaim()
                store.lend((choose.randint(0, 3), choose.randint(0, 3)))
            else:
                store.reclaim()
            assert store.length == len(kept)
            assert 0 <= store.tail_length < SHAPE.block_tokens
            check(store, conveyor, kept)
        store.close()


def test_a_reading_that_ends_between_layers_leaves_what_was_kept() -> None:
    for seed in range(30):
        choose = random.Random(seed)
        store, conveyor = make_store((choose.randint(0, 2), 0), staging=choose.randint(1, 2))
        kept = list(range(choose.randint(1, 13)))
        fill(store, kept)
        longer = kept + list(range(50, 50 + choose.randint(1, 12)))
        for layer in range(choose.randint(0, 1) + 1):
            so_far = choose.randint(len(kept), len(longer))
            last = so_far == len(longer) or choose.random() < 0.5
            store.fill(layer, kv_of(longer, layer), len(longer) if last else so_far, last=last)
        store.roll_back(len(kept))
        check(store, conveyor, kept)
        fill(store, longer)
        check(store, conveyor, longer)


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
    fill(store, tokens)
    seen = contents(store, conveyor)
    assert not all(torch.equal(s, kv_of(tokens, layer)) for layer, s in enumerate(seen))


def test_what_cannot_be_is_refused_before_any_change() -> None:
    store, _ = make_store()
    put(store, [1, 2, 3])
    with pytest.raises(RuntimeError, match=r"keep of rows \[0, 6\], a pass has 6"):
        store.keep([0, 6])
    with pytest.raises(RuntimeError, match="a pass of 7 tokens, the tail takes 6"):
        store.room(0, 7)
    store.keep(range(3))
    assert store.length == 3
    with pytest.raises(RuntimeError, match="it holds more"):
        store.fill(0, kv_of([1], 0), 1, last=True)
    with pytest.raises(RuntimeError, match="roll back to 4 tokens of 3"):
        store.roll_back(4)
    with pytest.raises(RuntimeError, match="commit_fill before every layer was filled"):
        store.commit_fill(9)


HEADS = 4


class Text:
    """Random queries, keys and values, and their causal attention, spelt out."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.qkv = torch.randn(tokens, HEADS + 2 * SHAPE.kv_heads, 8, generator=generator)
        self.seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()

    def feed(self, first: int, end: int, parents: Sequence[int] | None = None) -> Feed:
        rows = end - first
        # No rotation: cosines of one and sines of zero.
        rotation = (torch.ones(rows, 8), torch.zeros(rows, 8))
        parents = None if parents is None else tuple(parents)
        return Feed(torch.arange(rows), torch.arange(rows), parents, rotation=rotation)

    def attention(self, seen: torch.Tensor) -> torch.Tensor:
        """[heads, rows, head_dim] by seen [rows, keys], of the last rows."""
        query, key, value = self.qkv.transpose(0, 1).split((HEADS, SHAPE.kv_heads, SHAPE.kv_heads))
        query, key = query[:, -seen.shape[0] :], key.repeat_interleave(2, 0)
        scores = query @ key.transpose(1, 2) * 8**-0.5
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value.repeat_interleave(2, 0)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def read(store: KVStore, conveyor: Conveyor, text: Text, end: int, cuts: Sequence[int]) -> None:
    """Reads the text up to `end` behind what is kept, in parts."""
    first = store.length
    gathered = torch.empty(end * SHAPE.token_bytes, dtype=torch.uint8)
    start(store, conveyor)
    cache = PrefillCache(store, conveyor, end - first, gathered)
    whole = text.feed(first, end)
    expected = text.attention(text.seen)
    for layer in range(SHAPE.layers):
        for a, b in itertools.pairwise([first, *cuts, end]):
            out = cache.attend(layer, text.qkv[a:b], whole.slice(a - first, b - first))
            close(out, expected[:, a:b])
    cache.keep(range(end - first))


def test_passes_and_reading_attend_as_one_prefill_would() -> None:
    """In any order: text is read behind what passes kept, and passes follow it."""
    text = Text(40)
    expected = text.attention(text.seen)
    for resident in ((0, 0), (1, 0), (9, 9)):
        store, conveyor = make_store(resident, slots=2)
        read(store, conveyor, text, 10, (4, 8))
        for counts in ((1, 6, 3), (1, 2, 1)):
            for count in counts:
                start(store, conveyor)
                cache, first = PassCache(store, conveyor), store.length
                for layer in range(SHAPE.layers):
                    part = slice(first, first + count)
                    out = cache.attend(layer, text.qkv[part], text.feed(first, first + count))
                    close(out, expected[:, part])
                cache.keep(range(count))
            end = store.length + 7
            read(store, conveyor, text, end, (end - 5, end - 4))
        store.lend((2, 1))
        for _ in range(2):
            start(store, conveyor)
            cache, first = PassCache(store, conveyor), store.length
            for layer in range(SHAPE.layers):
                part = slice(first, first + 1)
                out = cache.attend(layer, text.qkv[part], text.feed(first, first + 1))
                close(out, expected[:, part])
            cache.keep([0])
        store.close()


def test_rows_of_a_tree_see_their_ancestors_and_a_path_of_them_is_kept() -> None:
    """Two branches over one root; the second is kept."""
    text = Text(16)
    store, conveyor = make_store((1, 0))
    read(store, conveyor, text, 10, ())
    parents = (-1, 0, 0, 1, 2, 4)
    seen = torch.ones(6, 16, dtype=torch.bool)
    seen[:, 10:] = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0],
            [1, 1, 0, 1, 0, 0],
            [1, 0, 1, 0, 1, 0],
            [1, 0, 1, 0, 1, 1],
        ]
    )
    start(store, conveyor)
    cache = PassCache(store, conveyor)
    for layer in range(SHAPE.layers):
        out = cache.attend(layer, text.qkv[10:], text.feed(10, 16, parents))
        close(out, text.attention(seen))
    with pytest.raises(RuntimeError, match=r"rows \[0, 1, 4\] are no path of a feed of 6"):
        cache.keep([0, 1, 4])
    assert store.length == 10
    cache.keep([0, 2, 4, 5])
    rows = [*range(10), 10, 12, 14, 15]
    for seen in contents(store, conveyor):
        keys, values = (text.qkv[rows, HEADS + i : HEADS + i + 2].transpose(0, 1) for i in (0, 2))
        assert torch.equal(seen, torch.stack((keys, values)))


def new_store(memory: DeviceMemory, blocks: HostBlocks, link) -> KVStore:
    staging = [torch.zeros(SHAPE.block_bytes, dtype=torch.uint8)]
    return KVStore(SHAPE, MAX_PASS, (1, 0), memory, blocks, link, staging)


class Broken(LateLink):
    def synchronize(self) -> None:
        raise LinkError("planted")


@pytest.mark.parametrize("link", [LateLink, Broken])
def test_a_store_gives_everything_back_even_if_the_link_has_failed(link) -> None:
    memory = DeviceMemory(torch.device("cpu"), 1 << 20)
    blocks = HostBlocks(SHAPE.block_bytes, HostMemory())
    taken = set()
    for _ in range(3):
        store = new_store(memory, blocks, link())
        fill(store, range(20))
        store.lend((1, 2))
        store.close()
        taken.add(blocks.nbytes)
        assert memory.available_bytes == memory.limit_bytes
    assert len(taken) == 1, "host blocks of texts that are gone are used again"


def test_what_is_rolled_back_is_used_again() -> None:
    memory = DeviceMemory(torch.device("cpu"), 1 << 20)
    blocks = HostBlocks(SHAPE.block_bytes, HostMemory())
    store = new_store(memory, blocks, LateLink())
    fill(store, range(20))
    taken, available = blocks.nbytes, memory.available_bytes
    for tokens in (3, 0, 11):
        store.roll_back(min(tokens, store.length))
        fill(store, range(20))
        assert (blocks.nbytes, memory.available_bytes) == (taken, available)


def test_a_store_over_the_budget_is_refused() -> None:
    memory = DeviceMemory(torch.device("cpu"), 100)
    with pytest.raises(DoesNotFitError, match="KV tail"):
        KVStore(SHAPE, MAX_PASS, (0, 0), memory, None, LateLink(), [])
    assert memory.available_bytes == 100
    memory = DeviceMemory(torch.device("cpu"), SHAPE.tail_bytes(MAX_PASS) + 10)
    with pytest.raises(DoesNotFitError, match="resident KV"):
        KVStore(SHAPE, MAX_PASS, (1, 0), memory, None, LateLink(), [])
    assert memory.available_bytes == memory.limit_bytes
