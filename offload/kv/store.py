"""The KV cache: blocks on the host or the device, a hot tail, and one owner of the length."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from offload.conveyor import Transfer
from offload.errors import DoesNotFitError, LinkError
from offload.kv.shape import KVShape
from offload.link.link import Event, Link
from offload.memory.device import DeviceMemory
from offload.memory.host import HostBlocks

RING = "kv"


KeysValues = tuple[torch.Tensor, torch.Tensor]


class Room(NamedTuple):
    """Where keys and values of some tokens go: [kv_heads, capacity, head_dim] each, from `start`
    on, a number, or [1] int64 on the device.
    """

    key: torch.Tensor
    value: torch.Tensor
    start: int | torch.Tensor


@dataclass(frozen=True)
class Block:
    """A block of one layer: on the device as `resident`, or on the host once `written` happened.

    key: the name of its transfer, if it streams
    """

    key: tuple[str, int, int]
    buffer: torch.Tensor
    written: Event | None
    resident: KeysValues | None


class KVStore:
    """KV of one request.

    Tokens [0, tail_start) of every layer lie in blocks of block_tokens; the rest lie in the hot
    tail, which also takes the tokens of a pass before they are committed. `commit` is the one place
    where the length changes. A full tail block moves out at commit: it is first copied to a staging
    slot on the device, so the tail is free at once while the link carries the block out behind it.

    The first `resident_blocks[layer]` blocks of a layer stay on the device, spread evenly over the
    layers, so that the link never rests for the length of a resident layer.
    """

    def __init__(
        self,
        shape: KVShape,
        max_pass_tokens: int,
        resident_blocks: Sequence[int],
        memory: DeviceMemory,
        host_blocks: HostBlocks,
        link: Link,
        staging: Sequence[torch.Tensor],
    ) -> None:
        """resident_blocks: for each layer, how many of its first blocks stay on the device.

        staging: flat uint8 device buffers of one block each; needed if any block goes to the host.
        Raises DoesNotFitError.
        """
        self.shape = shape
        self.length = 0
        self._tail_start = 0
        self._max_pass_tokens = max_pass_tokens
        self._memory = memory
        self._host_blocks = host_blocks
        self._link = link
        self._staging = list(staging)
        self._staged: list[Event | None] = [None] * len(self._staging)
        self._next_staging = 0
        self._pending = [0] * shape.layers
        self._blocks: list[list[Block]] = [[] for _ in range(shape.layers)]
        self._tail_allocation = memory.allocate(shape.tail_bytes(max_pass_tokens), "KV tail")
        self._tail = self._tail_allocation.bytes.view(shape.dtype).view(
            shape.layers,
            2,
            shape.kv_heads,
            shape.block_tokens + max_pass_tokens,
            shape.head_dim,
        )
        try:
            self._resident_allocation = memory.allocate(
                shape.block_bytes * sum(resident_blocks), "resident KV"
            )
        except DoesNotFitError:
            memory.free(self._tail_allocation)
            raise
        pool = iter(self._resident_allocation.bytes.split(shape.block_bytes))
        self._device_blocks = [[next(pool) for _ in range(count)] for count in resident_blocks]
        self._first_resident = [sum(resident_blocks[:i]) for i in range(shape.layers)]

    @property
    def tail_length(self) -> int:
        """Committed tokens that lie in the hot tail."""
        return self.length - self._tail_start

    def resident_blocks(self) -> int:
        return sum(block.resident is not None for blocks in self._blocks for block in blocks)

    def resident_layers(self) -> int:
        """Layers whose whole KV is on the device."""
        return sum(all(block.resident is not None for block in blocks) for blocks in self._blocks)

    def blocks(self) -> int:
        return sum(map(len, self._blocks))

    def room(self, layer: int, tokens: int) -> Room:
        """Where the KV of a pass's next tokens goes, which is uncommitted then.

        Raises RuntimeError if the pass exceeds what the tail can take.
        """
        start = self.tail_length + self._pending[layer]
        if self._pending[layer] + tokens > self._max_pass_tokens:
            raise RuntimeError(
                f"a pass of {self._pending[layer] + tokens} tokens, the tail takes "
                f"{self._max_pass_tokens}"
            )
        self._pending[layer] += tokens
        return Room(*self._tail[layer], start)

    def tail(self, layer: int) -> torch.Tensor:
        """[2, kv_heads, tokens, head_dim]: the committed tail and the pass's tokens so far."""
        return self._tail[layer, :, :, : self.tail_length + self._pending[layer]]

    def commit(self, tokens: int) -> None:
        """Ends a pass: keeps the first `tokens` of what it appended and drops the rest.

        Raises RuntimeError if the pass did not append that many in every layer.
        """
        if not 0 <= tokens <= min(self._pending):
            raise RuntimeError(f"commit of {tokens} tokens, the pass holds {min(self._pending)}")
        self._pending = [0] * self.shape.layers
        self.length += tokens
        while self.tail_length >= self.shape.block_tokens:
            self._move_out_tail_block()

    def fill(self, layer: int, keys_values: torch.Tensor, so_far: int | None = None) -> None:
        """Stores a layer's KV of a whole prompt, [2, kv_heads, tokens, head_dim].

        so_far: only the blocks that the first so many tokens complete; they leave while the rest is
        computed. The layers of a prompt are filled one by one; `commit_fill` then sets the length.
        Raises RuntimeError if the layer is full already.
        """
        block_tokens, filled = self.shape.block_tokens, len(self._blocks[layer])
        tokens = keys_values.shape[2] if so_far is None else so_far
        if self.length or filled * block_tokens > tokens:
            raise RuntimeError(f"fill of layer {layer}, which is full")
        for start in range(filled * block_tokens, tokens - block_tokens + 1, block_tokens):
            self._add_block(layer, keys_values[:, :, start : start + block_tokens])
        if so_far is None:
            rest = tokens % block_tokens
            self._tail[layer, :, :, :rest] = keys_values[:, :, tokens - rest :]

    def commit_fill(self, tokens: int) -> None:
        """Sets the length after `fill` of every layer."""
        if any(len(b) != tokens // self.shape.block_tokens for b in self._blocks):
            raise RuntimeError("commit_fill before every layer was filled")
        self.length = tokens
        self._tail_start = len(self._blocks[0]) * self.shape.block_tokens

    def transfers(self, layer: int) -> list[Transfer]:
        """The copies that bring the layer's streamed blocks in, in the order they are attended."""
        return [
            Transfer(block.key, RING, block.buffer, (block.written,))
            for block in self._blocks[layer]
            if block.resident is None
        ]

    def newest(self, tokens: int) -> torch.Tensor:
        """The last committed tokens of all layers, [layers, 2, kv_heads, tokens, head_dim]; they
        must lie in the hot tail.
        """
        if not 0 <= tokens <= self.tail_length:
            raise RuntimeError(f"{tokens} newest tokens, the tail holds {self.tail_length}")
        return self._tail[:, :, :, self.tail_length - tokens : self.tail_length]

    def layer_blocks(self, layer: int) -> Sequence[Block]:
        """The layer's blocks in token order."""
        return self._blocks[layer]

    def resident(self, layer: int) -> torch.Tensor:
        """The layer's resident blocks, [2, blocks, kv_heads, block_tokens, head_dim], which come
        before those that stream and lie side by side.
        """
        shape, first = self.shape, self._first_resident[layer]
        count = min(len(self._blocks[layer]), len(self._device_blocks[layer]))
        size = shape.block_bytes
        run = self._resident_allocation.bytes[first * size : (first + count) * size]
        exact = run.view(count, size)[:, : shape.token_bytes * shape.block_tokens]
        exact = exact.view(shape.dtype) if count else exact.new_empty(0, dtype=shape.dtype)
        return exact.view(count, 2, shape.kv_heads, shape.block_tokens, shape.head_dim).transpose(
            0, 1
        )

    def addresses(self) -> torch.Tensor:
        """Of each layer's blocks and, behind them, its tail: [layers, blocks + 1] int64 on the
        host, as `ChunkSource` wants them.
        """
        return torch.tensor(
            [
                [*(block.buffer.data_ptr() for block in blocks), tail.data_ptr()]
                for blocks, tail in zip(self._blocks, self._tail, strict=True)
            ]
        )

    @property
    def tail_capacity(self) -> int:
        """Tokens that the hot tail of a layer has room for."""
        return self._tail.shape[3]

    def close(self) -> None:
        """Gives back all memory, once the link has carried out what was on its way.

        A copy that failed is of no interest any more.
        """
        with suppress(LinkError):
            self._link.synchronize()
        for block in (block for blocks in self._blocks for block in blocks):
            if block.resident is None:
                self._host_blocks.give_back(block.buffer)
        self._blocks = []
        self._device_blocks = []
        self._memory.free(self._tail_allocation)
        self._memory.free(self._resident_allocation)
        del self._tail

    def _move_out_tail_block(self) -> None:
        block_tokens = self.shape.block_tokens
        rest = self.tail_length - block_tokens
        for layer in range(self.shape.layers):
            tail = self._tail[layer]
            self._add_block(layer, tail[:, :, :block_tokens])
            # Cloned because the two ranges may overlap.
            tail[:, :, :rest] = tail[:, :, block_tokens : block_tokens + rest].clone()
        self._tail_start += block_tokens

    def _add_block(self, layer: int, keys_values: torch.Tensor) -> None:
        blocks = self._blocks[layer]
        key = (RING, layer, len(blocks))
        if len(blocks) < len(self._device_blocks[layer]):
            buffer = self._device_blocks[layer][len(blocks)]
            self.shape.view(buffer).copy_(keys_values)
            blocks.append(Block(key, buffer, None, self.shape.keys_values(buffer)))
            return
        slot = self._next_staging
        self._next_staging = (slot + 1) % len(self._staging)
        if self._staged[slot] is not None:
            self._link.wait(self._staged[slot])
        self.shape.view(self._staging[slot]).copy_(keys_values)
        host = self._host_blocks.take()
        written = self._link.to_host(host, self._staging[slot], (self._link.record(),), key)
        self._staged[slot] = written
        blocks.append(Block(key, host, written, None))
