"""Copying scattered chunks of the KV cache, wherever they lie, to places on the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch

from offload.errors import LinkError
from offload.kv.store import Block, KVStore
from offload.link.link import Event, Link
from offload.memory.device import DeviceMemory, put


def as_chunks(keys_values: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """[2, kv_heads, tokens, head_dim] as its whole chunks, [2, kv_heads, n, chunk, head_dim]."""
    whole = keys_values.shape[2] // chunk_tokens * chunk_tokens
    return keys_values[:, :, :whole].unflatten(2, (-1, chunk_tokens))


class Reader(Protocol):
    """Brings chunks of the KV cache to places on the device.

    bytes_read: of those the device read in host memory itself, without the link's copies
    """

    bytes_read: int

    def copy(self, moves: torch.Tensor, target: torch.Tensor) -> None:
        """Copies committed chunks: those that `moves` names, as `gather_chunks` does.

        moves: [layers, kv_heads, slots] int64 on the device, -1 for none
        target: [layers, 2, kv_heads, slots, chunk, head_dim]. Raises LinkError.
        """

    def close(self) -> None:
        """Frees what it holds, once nothing is on its way any more."""


class ChunkReader:
    """Copies chunks of a layer, each of one KV head.

    Chunks in resident blocks and in the hot tail are copied on the device. Chunks in host blocks
    are first put together in a host buffer, which crosses the link in one copy.

    Invariants, and why they hold:
    - A host block is read only after its own bytes have come: the host waits for `written`.
    - A host buffer is refilled only after the copy out of it: the host waits for its event.
    - A device buffer is overwritten only after what was copied from it: `to_device` comes behind an
      event recorded when it is asked for, which is after those copies were.
    """

    bytes_read = 0

    def __init__(
        self,
        store: KVStore,
        link: Link,
        memory: DeviceMemory,
        chunk_tokens: int,
        host: Sequence[torch.Tensor],
    ) -> None:
        """host: GATHER_BUFFERS flat uint8 buffers, together `reader_bytes` of the tokens of one
        layer, all KV heads, that are copied at once at most.

        Raises DoesNotFitError.
        """
        self._store = store
        self._link = link
        self._memory = memory
        self._chunk = chunk_tokens
        size = host[0].numel()
        self._allocation = memory.allocate(len(host) * size, "retrieval gather")
        self._buffers = list(zip(host, self._allocation.bytes.split(size), strict=True))
        self._copied: list[Event | None] = [None] * len(host)
        self._next = 0

    def copy(self, moves: torch.Tensor, target: torch.Tensor) -> None:
        """As Reader.copy; the host waits for what the moves are computed from."""
        moves = moves.cpu()
        places = (moves >= 0).nonzero(as_tuple=True)
        (layers, heads, slots), chunks = places, moves[places]
        if not len(chunks):
            return
        store = self._store
        per_block = store.shape.block_tokens // self._chunk
        blocks = chunks // per_block
        # What lies in one block lies together, so that it is a slice of what is sent at once.
        order = (layers * (int(blocks.max()) + 1) + blocks).argsort(stable=True)
        places = torch.stack((heads, slots, chunks % per_block))[:, order]
        there = put(places, target.device)
        runs, counts = torch.stack((layers, blocks), 1)[order].unique_consecutive(
            dim=0, return_counts=True
        )
        start, crossing = 0, []
        for (layer, index), count, following in zip(
            runs.tolist(), counts.tolist(), [*runs[1:, 0].tolist(), None], strict=True
        ):
            part = slice(start, start + count)
            start += count
            whole = store.layer_blocks(layer)
            if index < len(whole) and whole[index].resident is None:
                crossing.append((whole[index], part))
            else:
                source = (
                    store.shape.view(whole[index].buffer)
                    if index < len(whole)
                    else store.tail(layer)
                )
                head, slot, inside = there[:, part]
                chosen = as_chunks(source, self._chunk)[:, head, inside]
                target[layer][:, head, slot] = chosen
            if crossing and following != layer:
                # Blocks in host memory are neighbours: the resident come before, the tail after.
                part = slice(crossing[0][1].start, crossing[-1][1].stop)
                arrived = self._carry(layer, crossing, places)
                head, slot, _ = there[:, part]
                target[layer][:, head, slot] = arrived
                crossing = []

    def close(self) -> None:
        """Frees the buffers, once nothing is on its way through them."""
        with suppress(LinkError):
            self._link.synchronize()
        self._memory.free(self._allocation)
        self._buffers = []

    def _carry(
        self, layer: int, crossing: Sequence[tuple[Block, slice]], places: torch.Tensor
    ) -> torch.Tensor:
        """Brings chunks of host blocks, in their order: [2, n, chunk, head_dim] on the device.

        crossing: each block with its part of places, [3, n]: head, slot, chunk within the block
        """
        shape = self._store.shape
        host, device = self._buffers[self._next]
        if self._copied[self._next] is not None:
            self._link.wait_on_host(self._copied[self._next])
        count = crossing[-1][1].stop - crossing[0][1].start
        size = (2, count, self._chunk, shape.head_dim)
        nbytes = 2 * count * self._chunk * shape.head_dim * shape.dtype.itemsize
        collected = host[:nbytes].view(shape.dtype).view(size)
        filled = 0
        for block, part in crossing:
            self._link.wait_on_host(block.written)
            heads, _, inside = places[:, part]
            found = as_chunks(shape.view(block.buffer), self._chunk)
            end = filled + len(heads)
            for half in range(2):
                collected[half, filled:end] = found[half, heads, inside]
            filled = end
        after = (self._link.record(),)
        event = self._link.to_device(device[:nbytes], host[:nbytes], after, ("retrieval", layer))
        self._copied[self._next] = event
        self._next = (self._next + 1) % len(self._buffers)
        self._link.wait(event)
        return device[:nbytes].view(shape.dtype).view(size)
