"""Small KV stores over a link that is as late as it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from triforce_offload.conveyor import Conveyor, Transfer
from triforce_offload.kv.evictions import StagingSlots
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.store import KVStore
from triforce_offload.link.link import LinkCounters
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.memory.host import HostBlocks, HostMemory
from triforce_offload.schedule import KV

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype=torch.float32)
SPLIT = replace(SHAPE, dtype=torch.bfloat16, split=True)
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
    resident: Sequence[int] = (0, 0),
    link=None,
    staging: int = 1,
    slots: int = 1,
    shape: KVShape = SHAPE,
) -> tuple[KVStore, Conveyor]:
    link = link or LateLink()
    memory = DeviceMemory(torch.device("cpu"), 1 << 20)

    def buffers(count: int) -> list[torch.Tensor]:
        return [torch.zeros(shape.slot_bytes, dtype=torch.uint8) for _ in range(count)]

    host = HostMemory()
    blocks, dense = HostBlocks(shape.block_bytes, host), HostBlocks(shape.dense_block_bytes, host)
    leaving = StagingSlots(buffers(staging), link)
    store = KVStore(shape, MAX_PASS, resident, memory, blocks, link, leaving, dense)
    return store, Conveyor(link, {KV: buffers(slots)})


def kv_of(tokens: Sequence[int], layer: int, shape: KVShape = SHAPE) -> torch.Tensor:
    """Recognisable KV: [2, kv_heads, tokens, head_dim]. The split format has room for one
    token of a block that is far smaller than the others, and not for two.
    """
    base = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None] * 10 + layer
    offsets = torch.arange(2 * shape.kv_heads * shape.head_dim).view(2, shape.kv_heads, 1, -1)
    values = base + offsets / 1000
    if shape.split:
        values = (values + 1).where(base.round() // 10 % 3 > 0, (values + 1) * 2.0**-40)
    return values.to(shape.dtype)


def start(store: KVStore, conveyor: Conveyor) -> None:
    """Starts a pass's copies of what streams."""
    conveyor.start(
        Transfer((KV, layer, index), KV, location.source)
        for layer in range(SHAPE.layers)
        for index, location in enumerate(store.locations(layer))
        if location.source is not None
    )
