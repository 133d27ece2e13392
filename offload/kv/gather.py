"""Copies scattered chunks of the KV cache from their locations to slots on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from triforce_offload.errors import LinkError
from triforce_offload.kv.block_format import as_chunks
from triforce_offload.kv.sizes import GATHER_BUFFERS
from triforce_offload.kv.store import KVStore
from triforce_offload.link.link import Event, Link
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import Allocation, DeviceMemory, put
from triforce_offload.memory.host import HostArena, HostMemory
from triforce_offload.weights.formats import ALIGNMENT
from triforce_offload.weights.locations import Location


class Reader(Protocol):
    """Copies chunks of the KV cache to the device.

    bytes_read: bytes that the device read in host memory itself, without the link's copies
    """

    bytes_read: int

    def copy(self, moves: torch.Tensor, target: torch.Tensor, first: int = 0) -> None:
        """Copy the kept chunks that `moves` names, as `gather_chunks` does.

        moves: [layers, kv_heads, slots] int64 on the device, -1 for none
        target: [layers, sides, kv_heads, slots, chunk, head_dim]
        first: index of the first of these layers

        Raises LinkError.
        """

    def count(self, moves: torch.Tensor, chunk_tokens: int) -> None:
        """Count the bytes that copying the moves of all layers read in host memory itself."""

    def release(self) -> None:
        """Free all memory taken since creation, once no copy is under way: a prefill needs it."""

    def close(self) -> None:
        """Free all memory, once no copy is under way."""


class _Buffer(NamedTuple):
    """A host buffer in which chunks are collected, and the device buffer for their copy."""

    arena: HostArena
    device: torch.Tensor


class ChunkReader:
    """Copies chunks of a layer, each of one KV head.

    Chunks in blocks on the device and in the hot tail are copied on the device. Chunks in host
    blocks are first collected in a host buffer, which crosses the link in one copy, or in several
    if they are more than the buffer holds. The buffers are allocated when they are first needed.

    Invariants, and why they hold:
    - A host block is read only after it has its bytes: the host waits for the events of its source.
    - A host buffer is refilled only after the copy out of it: the host waits for that copy's event.
    - A device buffer is overwritten only after it was read: `to_device` waits for an event recorded
      when it is called, which is after the kernels that read the buffer were launched.
    """

    bytes_read = 0

    def __init__(
        self,
        store: KVStore,
        link: Link,
        memory: DeviceMemory,
        host: HostMemory,
        chunk_tokens: int,
        most_bytes: int,
    ) -> None:
        """most_bytes: size of each buffer, of which device and host have GATHER_BUFFERS each; less
        if less device memory is left when they are allocated
        """
        self._store = store
        self._link = link
        self._memory = memory
        self._host = host
        self._chunk = chunk_tokens
        shape = store.shape
        self._chunk_bytes = shape.sides * chunk_tokens * shape.head_dim * shape.dtype.itemsize
        self._most_bytes = most_bytes
        self._allocation: Allocation | None = None
        self._buffers: list[_Buffer] = []
        self._copied: list[Event | None] = [None] * GATHER_BUFFERS
        self._next = 0

    def copy(self, moves: torch.Tensor, target: torch.Tensor, first: int = 0) -> None:
        """Reader.copy. The host waits for the computation of the moves.

        Also raises DoesNotFitError if there is no memory for a buffer of one chunk.
        """
        moves = come(moves).cpu()
        places = (moves >= 0).nonzero(as_tuple=True)
        (layers, heads, slots), chunks = places, moves[places]
        if not len(chunks):
            return
        store = self._store
        per_block = store.shape.block_tokens // self._chunk
        blocks = chunks // per_block
        # Sort by layer and block, so that the chunks of one block are a slice of one index
        # transfer.
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
            locations = store.locations(first + layer)
            if index < len(locations) and locations[index].source is not None:
                crossing.append((locations[index], part))
            else:
                head, slot, inside = there[:, part]
                if index < len(locations):
                    found = store.chunks(locations[index], head, inside, self._chunk)
                else:
                    found = as_chunks(store.tail(first + layer), self._chunk)[:, head, inside]
                target[layer][:, head, slot] = found
            if crossing and following != layer:
                # Blocks in host memory are consecutive: those on the device come before them, the
                # tail after.
                for piece in _pieces(crossing, self._chunks_at_once()):
                    head, slot, _ = there[:, piece[0][1].start : piece[-1][1].stop]
                    target[layer][:, head, slot] = self._carry(first + layer, piece, places)
                crossing = []

    def count(self, moves: torch.Tensor, chunk_tokens: int) -> None:
        """Reader.count: this reader counts nothing."""

    def release(self) -> None:
        """Reader.release."""
        if self._allocation is None:
            return
        with suppress(LinkError):
            self._link.synchronize()
        for buffer in self._buffers:
            buffer.arena.close()
        self._buffers, self._copied = [], [None] * GATHER_BUFFERS
        self._memory.free(self._allocation)
        self._allocation = None

    def close(self) -> None:
        """Reader.close."""
        self.release()

    def _chunks_at_once(self) -> int:
        """Return how many chunks a buffer holds. Allocates the buffers."""
        if self._allocation is None:
            left = self._memory.available_bytes // GATHER_BUFFERS // ALIGNMENT * ALIGNMENT
            size = max(self._chunk_bytes, min(self._most_bytes, left))
            self._allocation = self._memory.allocate(GATHER_BUFFERS * size, "retrieval gather")
            # Each buffer has its own arena, so that none begins in the middle of a registered
            # piece. They are added one by one: if the host has room for the first alone, `release`
            # finds it.
            for device in self._allocation.bytes.split(size):
                self._buffers.append(_Buffer(self._host.arena(size), device))
        return self._buffers[0].device.numel() // self._chunk_bytes

    def _carry(self, layer: int, piece: Piece, places: torch.Tensor) -> torch.Tensor:
        """Copy chunks of host blocks, in their order, to [sides, n, chunk, head_dim] on the device.

        places: [3, all]: head, slot, chunk within the block
        """
        shape = self._store.shape
        buffer = self._buffers[self._next]
        if self._copied[self._next] is not None:
            self._link.wait_on_host(self._copied[self._next])
        count = piece[-1][1].stop - piece[0][1].start
        nbytes = count * self._chunk_bytes
        size = (shape.sides, count, self._chunk, shape.head_dim)
        collected = buffer.arena.bytes[:nbytes].view(shape.dtype).view(size)
        filled = 0
        for location, part in piece:
            for event in location.source.after:
                self._link.wait_on_host(event)
            heads, _, inside = places[:, part]
            end = filled + len(heads)
            collected[:, filled:end] = self._store.chunks(location, heads, inside, self._chunk)
            filled = end
        event = self._link.to_device(
            buffer.device[:nbytes],
            buffer.arena.bytes[:nbytes],
            (self._link.record(),),
            ("retrieval", layer),
        )
        self._copied[self._next] = event
        self._next = (self._next + 1) % GATHER_BUFFERS
        self._link.wait(event)
        return buffer.device[:nbytes].view(shape.dtype).view(size)


# Host blocks, each with the slice of all moving chunks that it contains.
Piece = list[tuple[Location, slice]]


def _pieces(crossing: Piece, most: int) -> Iterator[Piece]:
    """Yield the chunks of some blocks, at most `most` at a time."""
    piece: Piece = []
    count = 0
    for location, part in crossing:
        start = part.start
        while start < part.stop:
            end = min(part.stop, start + most - count)
            piece.append((location, slice(start, end)))
            count += end - start
            start = end
            if count == most:
                yield piece
                piece, count = [], 0
    if piece:
        yield piece
