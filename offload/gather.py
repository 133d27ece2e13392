"""Copying scattered chunks of the KV cache, wherever they lie, to places on the device."""

from __future__ import annotations

from contextlib import suppress

import torch

from .device import DeviceMemory
from .errors import LinkError
from .kv import KVShape, KVStore
from .link import Event, Link

_BUFFERS = 2
"""While one layer's chunks cross the link, the next layer's are collected."""


def reader_bytes(shape: KVShape, tokens: int) -> int:
    """Device bytes of a ChunkReader, and its host bytes."""
    return _BUFFERS * shape.token_bytes * tokens


def as_chunks(keys_values: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """[2, kv_heads, tokens, head_dim] as its whole chunks, [2, kv_heads, n, chunk, head_dim]."""
    whole = keys_values.shape[2] // chunk_tokens * chunk_tokens
    return keys_values[:, :, :whole].unflatten(2, (-1, chunk_tokens))


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

    def __init__(
        self,
        store: KVStore,
        link: Link,
        memory: DeviceMemory,
        chunk_tokens: int,
        host: torch.Tensor,
    ) -> None:
        """host: flat uint8 buffer of `reader_bytes` of the tokens of one layer, all KV heads, that
        are copied at once at most.

        Raises DoesNotFitError.
        """
        self._store = store
        self._link = link
        self._memory = memory
        self._chunk = chunk_tokens
        size = host.numel()
        self._allocation = memory.allocate(size, "retrieval gather")
        self._buffers = list(
            zip(
                host.split(size // _BUFFERS),
                self._allocation.bytes.split(size // _BUFFERS),
                strict=True,
            )
        )
        self._copied: list[Event | None] = [None] * _BUFFERS
        self._next = 0

    def copy(
        self,
        layer: int,
        heads: torch.Tensor,
        chunks: torch.Tensor,
        target: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Copies committed chunk chunks[i] of KV head heads[i] to target[:, heads[i], slots[i]].

        heads, chunks, slots: int64 on the host; target: [2, kv_heads, slots, chunk, head_dim].
        Raises LinkError.
        """
        store, device = self._store, target.device
        per_block = store.shape.block_tokens // self._chunk
        block_of, inside = chunks // per_block, chunks % per_block
        blocks = store.layer_blocks(layer)
        crossing: list[torch.Tensor] = []
        for index in block_of.unique().tolist():
            which = (block_of == index).nonzero().squeeze(1)
            if index < len(blocks) and blocks[index].resident is None:
                crossing.append(which)
                continue
            source = (
                store.tail(layer)
                if index == len(blocks)
                else store.shape.view(blocks[index].buffer)
            )
            head, where = heads[which].to(device), inside[which].to(device)
            target[:, head, slots[which].to(device)] = as_chunks(source, self._chunk)[
                :, head, where
            ]
        if crossing:
            order = torch.cat(crossing)
            target[:, heads[order].to(device), slots[order].to(device)] = self._carry(
                layer, crossing, block_of, heads, inside
            )

    def close(self) -> None:
        """Frees the buffers, once nothing is on its way through them."""
        with suppress(LinkError):
            self._link.synchronize()
        self._memory.free(self._allocation)
        self._buffers = []

    def _carry(
        self,
        layer: int,
        crossing: list[torch.Tensor],
        block_of: torch.Tensor,
        heads: torch.Tensor,
        inside: torch.Tensor,
    ) -> torch.Tensor:
        """Brings chunks of host blocks, grouped by block: [2, n, chunk, head_dim] on the device."""
        shape = self._store.shape
        host, device = self._buffers[self._next]
        if self._copied[self._next] is not None:
            self._link.wait_on_host(self._copied[self._next])
        size = (2, sum(map(len, crossing)), self._chunk, shape.head_dim)
        nbytes = 2 * size[1] * self._chunk * shape.head_dim * shape.dtype.itemsize
        collected = host[:nbytes].view(shape.dtype).view(size)
        filled = 0
        for which in crossing:
            block = self._store.layer_blocks(layer)[int(block_of[which[0]])]
            self._link.wait_on_host(block.written)
            source = as_chunks(shape.view(block.buffer), self._chunk)
            for part in range(2):
                collected[part, filled : filled + len(which)] = source[
                    part, heads[which], inside[which]
                ]
            filled += len(which)
        after = (self._link.record(),)
        event = self._link.to_device(device[:nbytes], host[:nbytes], after, ("retrieval", layer))
        self._copied[self._next] = event
        self._next = (self._next + 1) % _BUFFERS
        self._link.wait(event)
        return device[:nbytes].view(shape.dtype).view(size)
