"""Reads chunks on the device directly from their location, host memory included."""

from __future__ import annotations

from contextlib import suppress

import torch

from triforce_kernels.dispatch import TRITON, backend
from triforce_kernels.kv.gather import ChunkSource, gather_chunks
from triforce_kernels.kv.gather_split import SplitChunkSource, gather_split_chunks
from triforce_offload.errors import LinkError
from triforce_offload.kv.gather import ChunkReader, Reader
from triforce_offload.kv.store import KVStore
from triforce_offload.link.cuda import reads_host_memory
from triforce_offload.link.link import Link
from triforce_offload.link.waiting import number
from triforce_offload.memory.device import put
from triforce_offload.memory.host import HostMemory


class DirectReader:
    """Copies chunks of all layers with one kernel, which reads registered host memory in place: the
    processor collects nothing and the host waits for nothing.

    If any block is in memory that the driver did not register, or could not be split, a ChunkReader
    makes all copies instead.

    Invariants, and why they hold:
    - A host block is read only after it has its bytes: whenever locations have changed, the device
      waits for the events of each source before it reads from their addresses.
    - A block's host memory is reused only after an event that is recorded after this read, as every
      copy to the host waits for one. It is unregistered only after `close`, which waits.
    - Nothing enters the link's copy queue, so the copies of the next pass do not queue behind these
      reads.

    bytes_read: bytes read from host memory so far. Reading this property waits for the device.
    """

    def __init__(
        self, store: KVStore, link: Link, host: HostMemory, collected: ChunkReader
    ) -> None:
        """collected: reader to use when some blocks are in pageable memory."""
        self._store = store
        self._link = link
        self._host = host
        self._collected = collected
        self._version = -1
        self._direct = True
        self._read: torch.Tensor | int = 0

    @property
    def bytes_read(self) -> int:
        return number(self._read)

    def copy(self, moves: torch.Tensor, target: torch.Tensor, first: int = 0) -> None:
        """Reader.copy."""
        store, shape = self._store, self._store.shape
        if self._version != store.version:
            self._look(moves.device)
        if not self._direct:
            self._collected.copy(moves, target, first)
            return
        addresses = self._addresses[first : first + moves.shape[0]]
        tokens = shape.block_tokens, store.tail_capacity
        if shape.split:
            at = shape.parts
            gather_split_chunks(
                moves,
                SplitChunkSource(addresses, *tokens, at.high, at.low, at.base),
                target,
            )
        else:
            gather_chunks(moves, ChunkSource(addresses, *tokens), target)

    def count(self, moves: torch.Tensor, chunk_tokens: int) -> None:
        """Reader.count."""
        store, shape = self._store, self._store.shape
        if not self._direct:
            return
        block = moves // (shape.block_tokens // chunk_tokens)
        crossing = (block >= self._on_device) & (block < len(store.locations(0)))
        nbytes = shape.sides * chunk_tokens * shape.head_dim * shape.dtype.itemsize
        if shape.split:
            # 12 of 16 bits per number, and the bases.
            nbytes = nbytes * 3 // 4 + shape.sides * shape.head_dim
        self._read = self._read + crossing.sum() * nbytes

    def release(self) -> None:
        """Reader.release."""
        self._collected.release()

    def close(self) -> None:
        """Wait until no chunk is being read; host memory may be unregistered afterwards."""
        with suppress(LinkError):
            self._link.wait_on_host(self._link.record())
        self._collected.close()

    def _look(self, device: torch.device) -> None:
        """Update the addresses of all blocks, and wait for their bytes."""
        store = self._store
        self._direct = True
        for layer in range(store.shape.layers):
            for location in store.locations(layer):
                # A block that could not be split has another layout.
                self._direct &= not location.dense
                if location.source is not None:
                    for event in location.source.after:
                        self._link.wait(event)
                    self._direct &= self._host.is_direct(location.memory)
        table = store.addresses()
        self._addresses = put(table.flatten(), device).view(table.shape)
        on_device = [store.on_device(layer) for layer in range(store.shape.layers)]
        self._on_device = put(on_device, device).view(-1, 1, 1)
        self._version = store.version


def reads_in_place(device: torch.device) -> bool:
    """Return whether a device reads chunks in place where they are in registered memory."""
    return device.type == "cuda" and backend(device) == TRITON and reads_host_memory(device)


def reader(store: KVStore, link: Link, host: HostMemory, collected: ChunkReader) -> Reader:
    """Return the reader that suits the device of a store's memory."""
    if reads_in_place(store.device):
        return DirectReader(store, link, host, collected)
    return collected
