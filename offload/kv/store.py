"""The KV cache of one sequence: blocks with locations, a hot tail, and one owner of the length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

import torch

from triforce_offload.errors import DoesNotFitError, LinkError
from triforce_offload.kv.block_format import BlockFormat, DenseBlocks, KeysValues, SplitBlocks
from triforce_offload.kv.blocks import DeviceBlocks
from triforce_offload.kv.evictions import StagingSlots
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.tail import HotTail
from triforce_offload.link.link import Link
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.memory.host import HostBlocks
from triforce_offload.schedule import KV
from triforce_offload.weights.locations import (
    DenseLocation,
    DeviceLocation,
    HostLocation,
    Location,
    MirroredLocation,
)


class KVStore:
    """The KV of one sequence.

    Tokens [0, tail_start) of every layer are in blocks, stored as the shape says; the rest are in
    the hot tail, which also takes the rows of a pass before any of them is kept. Only `keep`,
    `commit_fill` and `roll_back` change the length. A full tail block is evicted when its last row
    is kept: it is first copied to a staging slot on the device, so the tail is free at once while
    the link copies the block out.

    The first `resident_blocks[layer]` blocks of a layer stay on the device, spread evenly over the
    layers, so that the link never rests for the length of a resident layer. Some blocks after them
    may have a copy on the device (`use_reclaimed`); the others stream.

    length: number of kept tokens; version: changes whenever a block's location does
    """

    def __init__(
        self,
        shape: KVShape,
        max_pass_tokens: int,
        resident_blocks: Sequence[int],
        memory: DeviceMemory,
        host_blocks: HostBlocks,
        link: Link,
        staging: StagingSlots,
        dense_blocks: HostBlocks | None = None,
    ) -> None:
        """resident_blocks: for each layer, the number of its first blocks that stay on the device.

        staging: slots for eviction, at least one if any block goes to the host.
        dense_blocks: host memory for blocks that cannot be split. Raises DoesNotFitError.
        """
        self.shape = shape
        self.device = memory.device
        self.length = 0
        self.version = 0
        self.max_pass_tokens = max_pass_tokens
        self._tail_start = 0
        self._memory = memory
        self._host_blocks = host_blocks
        self._dense_blocks = dense_blocks
        self._link = link
        self._staging = staging
        self._locations: list[list[Location]] = [[] for _ in range(shape.layers)]
        self._mirror: DeviceBlocks | None = None
        with ExitStack() as undo:
            self._tail = HotTail(shape, max_pass_tokens, memory)
            undo.callback(self._tail.close)
            self._scratch = memory.allocate(shape.scratch_bytes, "KV decoding")
            undo.callback(memory.free, self._scratch)
            self._resident = DeviceBlocks(shape, resident_blocks, memory, "resident KV")
            undo.pop_all()
        self._dense = DenseBlocks(shape)
        self._format: BlockFormat = self._dense
        if shape.split:
            self._format = SplitBlocks(shape, self._scratch.bytes)

    @property
    def tail_length(self) -> int:
        """Number of kept tokens in the hot tail."""
        return self.length - self._tail_start

    @property
    def tail_capacity(self) -> int:
        """Number of tokens that the hot tail of a layer has room for."""
        return self._tail.capacity

    def locations(self, layer: int) -> Sequence[Location]:
        """Return the locations of the layer's blocks, in token order."""
        return self._locations[layer]

    def on_device(self, layer: int) -> int:
        """Return how many of the layer's blocks, counted from the first, are on the device."""
        locations = self._locations[layer]
        streamed = (i for i, location in enumerate(locations) if location.source is not None)
        return next(streamed, len(locations))

    def first_away(self, layer: int) -> int:
        """Return how many of the first blocks are on the device, or have a place there."""
        mirrored = self._mirror.counts[layer] if self._mirror else 0
        return max(self.on_device(layer), self._resident.counts[layer] + mirrored)

    def runs(self, layer: int) -> Iterator[KeysValues]:
        """Yield the layer's blocks on the device, keys and values [blocks, kv_heads, block_tokens,
        head_dim] each, in token order: adjacent blocks together, or a few at a time if they have to
        be decoded. Each pair is valid until the next.
        """
        count = self.on_device(layer)
        resident = min(count, self._resident.counts[layer])
        if resident:
            yield from self._format.runs(self._resident.run(layer, resident))
        if count > resident:
            yield from self._format.runs(self._mirror.run(layer, count - resident))

    def read(self, location: Location, block: torch.Tensor) -> torch.Tensor:
        """Return a block, [sides, kv_heads, block_tokens, head_dim], valid until the next read.
        block: the location's bytes on the device
        """
        return self._format_of(location).read(block)

    def copy(self, location: Location, block: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a block to [sides, kv_heads, block_tokens, head_dim]. block: the location's bytes
        on the device
        """
        self._format_of(location).copy(block, target)

    def chunks(
        self, location: Location, heads: torch.Tensor, chunks: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """Return chunks of a block in its place, [sides, n, tokens, head_dim], for drafting.

        heads, chunks: [n] int64 on the block's device: KV heads, and chunks of the block
        """
        return self._format_of(location).chunks(location.memory, heads, chunks, tokens)

    def tail(self, layer: int, rows: int = 0) -> torch.Tensor:
        """Return [sides, kv_heads, tokens, head_dim]: the tail's kept tokens, then `rows` rows."""
        return self._tail.rows[layer, :, :, : self.tail_length + rows]

    def room(self, layer: int, end: int) -> KeysValues:
        """Return the layer's whole tail, keys and values [kv_heads, tail_capacity, head_dim] each.
        Rows of a pass go after `tail_length`.

        Raises RuntimeError if the pass, up to row `end`, exceeds the room of the tail.
        """
        if end > self.max_pass_tokens:
            raise RuntimeError(f"a pass of {end} tokens, the tail takes {self.max_pass_tokens}")
        return self._tail.rooms[layer]

    def on_host(self, layer: int) -> torch.Tensor:
        """Copy all kept KV of a layer, [sides, kv_heads, length, head_dim], to new host memory.
        Waits for the device. Raises LinkError.
        """
        shape, size = self.shape, self.shape.block_tokens
        whole = torch.empty(shape.size(self.length), dtype=shape.dtype)
        for index, location in enumerate(self._locations[layer]):
            for event in location.source.after if location.source else ():
                self._link.wait_on_host(event)
            place = whole[:, :, index * size : (index + 1) * size]
            if location.memory.device.type == "cpu":
                self.copy(location, location.memory, place)
            else:
                place.copy_(self._format_of(location).read(location.memory))
        whole[:, :, self._tail_start :] = self.tail(layer)
        return whole

    def newest(self, tokens: int) -> torch.Tensor:
        """Return the last `tokens` kept tokens of all layers, [layers, sides, kv_heads, tokens,
        head_dim]. They must be in the hot tail.
        """
        if not 0 <= tokens <= self.tail_length:
            raise RuntimeError(f"{tokens} newest tokens, the tail holds {self.tail_length}")
        return self._tail.rows[:, :, :, self.tail_length - tokens : self.tail_length]

    def addresses(self) -> torch.Tensor:
        """Return the addresses of each layer's blocks, followed by that of its tail: [layers,
        blocks + 1] int64 on the host, as for `ChunkSource`.
        """
        layers = zip(self._locations, self._tail.rows, strict=True)
        return torch.tensor(
            [[*(each.memory.data_ptr() for each in some), tail.data_ptr()] for some, tail in layers]
        )

    def expect(self, tokens: int) -> None:
        """Announce that the sequence will be `tokens` tokens long.

        Raises DoesNotFitError if host memory has no room for the KV that will stream.
        """
        blocks = tokens // self.shape.block_tokens
        self._host_blocks.reserve(
            sum(
                max(0, blocks - max(len(locations), resident))
                for locations, resident in zip(self._locations, self._resident.counts, strict=True)
            )
        )

    def keep(self, rows: Sequence[int]) -> None:
        """End a pass: keep these of the rows that it put after the tail, in this order.

        Raises RuntimeError, before any change, for rows that a pass cannot have.
        """
        if any(not 0 <= row < self.max_pass_tokens for row in rows):
            raise RuntimeError(f"keep of rows {list(rows)}, a pass has {self.max_pass_tokens}")
        self._tail.keep(self.tail_length, rows)
        self.length += len(rows)
        while self.tail_length >= self.shape.block_tokens:
            self._move_out_tail_block()

    def fill(self, layer: int, keys_values: torch.Tensor, tokens: int, *, last: bool) -> None:
        """Store a layer's KV of a sequence that begins with the kept context.

        keys_values: [sides, kv_heads, whole sequence, head_dim], of which the first `tokens` are
            valid: the blocks that they complete are evicted meanwhile
        last: whether these are all tokens
        The layers of a sequence are filled one by one; `commit_fill` then sets the length. Raises
        RuntimeError if `tokens` is less than what was filled.
        """
        block_tokens, filled = self.shape.block_tokens, len(self._locations[layer])
        if tokens < max(self.length, filled * block_tokens):
            raise RuntimeError(f"fill of layer {layer} with {tokens} tokens, it holds more")
        for start in range(filled * block_tokens, tokens - block_tokens + 1, block_tokens):
            self._add_block(layer, keys_values[:, :, start : start + block_tokens])
        if last:
            rest = tokens % block_tokens
            self._tail.rows[layer, :, :, :rest] = keys_values[:, :, tokens - rest : tokens]

    def commit_fill(self, tokens: int) -> None:
        """Set the length after `fill` of every layer."""
        blocks = tokens // self.shape.block_tokens
        if any(len(locations) != blocks for locations in self._locations):
            raise RuntimeError("commit_fill before every layer was filled")
        self.length = tokens
        self._tail_start = blocks * self.shape.block_tokens

    def roll_back(self, length: int) -> None:
        """Drop all but the first `length` tokens, and a fill that was not committed. The block in
        which they end becomes the tail again.

        Raises RuntimeError if fewer are kept, or LinkError.
        """
        if not 0 <= length <= self.length:
            raise RuntimeError(f"roll back to {length} tokens of {self.length}")
        blocks, rest = divmod(length, self.shape.block_tokens)
        for layer, locations in enumerate(self._locations):
            if len(locations) > blocks:
                if rest:
                    self._recall(layer, locations[blocks], rest)
                for location in reversed(locations[blocks:]):
                    self._give_back(location)
                del locations[blocks:]
        self.length = length
        self._tail_start = blocks * self.shape.block_tokens
        self.version += 1

    def use_reclaimed(self, counts: Sequence[int]) -> None:
        """Allocate device memory for copies of `counts[layer]` blocks after each layer's resident
        ones. A block gets its copy when it is streamed (`settle`), a new block at once.

        Raises DoesNotFitError.
        """
        self._mirror = DeviceBlocks(self.shape, counts, self._memory, "KV in reclaimed memory")

    def settle(self, layer: int, index: int, block: torch.Tensor) -> None:
        """Keep a copy of a streamed block if there is memory for it. block: its device bytes"""
        location = self._locations[layer][index]
        if location.source and (copy := self._reclaimed_for(layer, index)) is not None:
            copy.copy_(block)
            self._locations[layer][index] = MirroredLocation(location, copy)
            self.version += 1

    def release_reclaimed(self) -> bool:
        """Free reclaimed memory, so that its blocks stream again. Return whether there was any."""
        if self._mirror is None:
            return False
        for locations in self._locations:
            locations[:] = [location.host or location for location in locations]
        self._mirror.close()
        self._mirror = None
        self.version += 1
        return True

    def give_up_resident(self) -> bool:
        """Evict resident blocks to host memory for good; these and later blocks stream. Return
        whether any were evicted. Do not call it while memory is reclaimed.

        Raises LinkError.
        """
        if not sum(self._resident.counts):
            return False
        staying = [(i, self.on_device(i)) for i in range(self.shape.layers)]
        try:
            self._host_blocks.make_room(sum(count for _, count in staying))
        except DoesNotFitError:
            return False
        for layer, count in staying:
            for index, location in enumerate(self._locations[layer][:count]):
                self._locations[layer][index] = self._start_eviction(location.memory, layer, index)
        # Their memory is reused next, so the copies must be complete.
        self._link.synchronize()
        self._resident.close()
        none = [0] * self.shape.layers
        self._resident = DeviceBlocks(self.shape, none, self._memory, "resident KV")
        self.version += 1
        return True

    def close(self) -> None:
        """Free all memory, once the link has completed all copies, or failed to."""
        with suppress(LinkError):
            self._link.synchronize()
        self._staging.forget()
        # In this order, so that blocks that are taken again lie one behind the other.
        for locations in reversed(self._locations):
            for location in reversed(locations):
                self._give_back(location)
        self._locations = []
        self.release_reclaimed()
        self._tail.close()
        self._memory.free(self._scratch)
        self._resident.close()
        del self._format

    def _move_out_tail_block(self) -> None:
        block_tokens = self.shape.block_tokens
        rest = self.tail_length - block_tokens
        for layer in range(self.shape.layers):
            self._add_block(layer, self._tail.rows[layer, :, :, :block_tokens])
            self._tail.shift(layer, block_tokens, rest)
        self._tail_start += block_tokens

    def _add_block(self, layer: int, keys_values: torch.Tensor) -> None:
        locations = self._locations[layer]
        index = len(locations)
        self.version += 1
        has_room = True
        if index < self._resident.counts[layer] and self.on_device(layer) == index:
            buffer = self._resident.buffer(layer, index)
            has_room = self._format.write(buffer, keys_values)
            if has_room:
                locations.append(DeviceLocation(buffer))
                return
        buffer = self._staging.take()
        block = buffer[: self._format.nbytes]
        is_dense = not (has_room and self._format.write(block, keys_values))
        if is_dense:
            block = buffer[: self._dense.nbytes]
            self._dense.write(block, keys_values)
        location = self._start_eviction(block, layer, index, is_dense=is_dense)
        self._staging.copied_after(location.source.after[0])
        locations.append(location)
        self.settle(layer, index, block)

    def _start_eviction(
        self, block: torch.Tensor, layer: int, index: int, *, is_dense: bool = False
    ) -> HostLocation:
        """Start the copy of a block to the host and return its new location."""
        blocks, made = self._host_blocks, HostLocation
        if is_dense:
            blocks, made = self._dense_blocks, DenseLocation
        host, after = blocks.take(), (self._link.record(),)
        try:
            return made(host, self._link.to_host(host, block, after, (KV, layer, index)))
        except BaseException:
            # No location owns the memory yet, so nothing else would give it back.
            blocks.give_back(host)
            raise

    def _recall(self, layer: int, location: Location, tokens: int) -> None:
        """Copy the first tokens of a block to the beginning of the tail."""
        if location.source is None:
            block = location.memory
        else:
            block = self._staging.take()[: location.memory.numel()]
            after = (*location.source.after, self._link.record())
            self._link.wait(self._link.to_device(block, location.memory, after, (KV, layer)))
        kept = self._format_of(location).read(block)
        self._tail.rows[layer, :, :, :tokens] = kept[:, :, :tokens]

    def _format_of(self, location: Location) -> BlockFormat:
        return self._dense if location.dense else self._format

    def _reclaimed_for(self, layer: int, index: int) -> torch.Tensor | None:
        place = index - self._resident.counts[layer]
        if self._mirror is None or not 0 <= place < self._mirror.counts[layer]:
            return None
        # After a block that must stream, all stream: those on the device are the first ones.
        if any(location.dense for location in self._locations[layer][: index + 1]):
            return None
        return self._mirror.buffer(layer, place)

    def _give_back(self, location: Location) -> None:
        if host := location.host:
            (self._dense_blocks if host.dense else self._host_blocks).give_back(host.memory)
