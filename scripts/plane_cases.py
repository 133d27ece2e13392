"""What bench_kernels.py times of planes: weights, blocks of KV, and chunks of such blocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from kernel_cases import CALLS, CHUNK, CHURN, KernelCases, KernelRow
from triforce_kernels import planes
from triforce_kernels.gather_planes import PlaneChunkSource, gather_plane_chunks
from triforce_kernels.upper import UpperWeight, upper_matmul

from offload.kv.block_format import PlaneBlocks
from offload.kv.shape import KVShape
from offload.memory.host import CudaDriver, HostMemory

BLOCK_TOKENS = 1024


@dataclass(frozen=True)
class PlaneCases(KernelCases):
    def rows(self) -> Iterator[KernelRow]:
        for rows in (self._weights, self._blocks_of_kv, self._chunks):
            yield from rows()
            self.settle()

    def _weights(self) -> Iterator[KernelRow]:
        out, width = self.config.mlp, self.config.hidden
        dense = [(self.draw(out, width) * 0.02).bfloat16() for _ in range(2)]
        weights = [planes.encode(each) for each in dense]
        numbers, shape = out * width, f"{out} x {width}"
        yield self.row(
            "decode_planes", shape, numbers * 7 // 2, 0.0,
            [partial(planes.decode, w) for w in weights],
            rival="copy of as many numbers",
            rival_seconds=self.times([d.clone for d in dense]),
        )  # fmt: skip
        if self.device.type == "cpu":
            # On a GPU weights are encoded by the host, as they are read.
            runs = [partial(planes.encode, d) for d in dense]
            yield self.row("planes.encode", shape, numbers * 7 // 2, 0.0, runs)
        upper = [UpperWeight.of(each) for each in weights]
        for rows in (1, 17):
            x = self.draw(rows, width).bfloat16()
            yield self.row(
                "product by upper planes", f"{rows} x {width} by {out}", numbers,
                2.0 * rows * numbers, [partial(upper_matmul, x, w) for w in upper],
                rival="dense product",
                rival_seconds=self.times([partial(F.linear, x, d) for d in dense]),
            )  # fmt: skip

    def _blocks_of_kv(self) -> Iterator[KernelRow]:
        shape, exact = self._shape, self._keys_values()
        scratch = torch.empty(shape.dense_block_bytes, dtype=torch.uint8, device=self.device)
        coder = PlaneBlocks(shape, scratch)
        buffers = [self._bytes(coder.nbytes) for _ in range(CALLS)]
        for buffer in buffers:
            if not coder.write(buffer, exact):
                raise RuntimeError("a block of random KV has no room for its exceptions")
        what, nbytes = f"{BLOCK_TOKENS} tokens of a layer", shape.numbers * 7 // 2
        yield self.row(
            "decode_kv_blocks", what, nbytes, 0.0, [partial(coder.read, b) for b in buffers],
            rival="copy of as many numbers", rival_seconds=self.times([exact.clone]),
        )  # fmt: skip
        # Encoding waits for the device to say whether there was room: not from a graph.
        seconds = statistics.median(
            self._until_written(coder, buffers, exact) for _ in range(self.repeats)
        )
        rate = self.rates.memory_bytes_per_second
        yield KernelRow("encode_kv_block, its wait included", what, nbytes, 0.0, seconds,
                        "memory", nbytes / rate)  # fmt: skip

    def _chunks(self) -> Iterator[KernelRow]:
        shape, at = self._shape, self._shape.planes
        coder = PlaneBlocks(shape, self._bytes(shape.dense_block_bytes))
        block = self._bytes(coder.nbytes)
        coder.write(block, self._keys_values())
        layers, heads = self.config.layers, self.config.kv_heads
        slots = min(4096, self.context // 2) // CHUNK
        blocks = max(1, self.context // BLOCK_TOKENS)
        moves = torch.randint(0, blocks * BLOCK_TOKENS // CHUNK, (layers, heads, slots))
        moves = moves.where(torch.rand(moves.shape) < CHURN, -1).to(self.device)
        target = torch.zeros(
            layers, 2, heads, slots, CHUNK, shape.head_dim, dtype=torch.bfloat16,
            device=self.device,
        )  # fmt: skip
        count = int((moves >= 0).sum())
        inputs = f"{count} chunks of {CHUNK} x {shape.head_dim}"
        nbytes = count * 2 * CHUNK * shape.head_dim * 3 // 2

        def gathering(where: torch.Tensor) -> partial:
            addresses = torch.full((layers, blocks + 1), where.data_ptr(), device=self.device)
            source = PlaneChunkSource(
                addresses, BLOCK_TOKENS, BLOCK_TOKENS, at.upper, at.lower, at.base
            )
            return partial(gather_plane_chunks, moves, source, target)

        name = "gather_plane_chunks"
        written = count * 2 * CHUNK * shape.head_dim * 2
        yield self.row(f"{name}, device blocks", inputs, nbytes + written, 0.0, gathering(block))
        if self.device.type == "cuda":
            memory = HostMemory(CudaDriver(self.device))
            with memory.arena(block.numel()) as arena:
                if arena.pinned:
                    arena.bytes.copy_(block)
                    row = self.row(f"{name}, host blocks", inputs, nbytes, 0.0,
                                   gathering(arena.bytes))  # fmt: skip
                    link = self.rates.link_bytes_per_second
                    yield replace(row, ceiling="link", ceiling_seconds=nbytes / link)
                self.settle()

    def _until_written(
        self, coder: PlaneBlocks, buffers: list[torch.Tensor], exact: torch.Tensor
    ) -> float:
        self.settle()
        began = time.perf_counter()
        for buffer in buffers:
            coder.write(buffer, exact)
        self.settle()
        return (time.perf_counter() - began) / len(buffers)

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.device)

    def _keys_values(self) -> torch.Tensor:
        shape = self._shape
        return self.draw(2, shape.kv_heads, BLOCK_TOKENS, shape.head_dim).bfloat16()

    @property
    def _shape(self) -> KVShape:
        config = self.config
        return KVShape(
            config.layers, config.kv_heads, config.head_dim, BLOCK_TOKENS, torch.bfloat16,
            text_tokens=self.context, in_planes=True,
        )  # fmt: skip
