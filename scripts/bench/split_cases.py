"""The cases of `bench kernels --split`: weights, blocks of KV, and chunks of these blocks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.kernel_cases import CALLS, CHUNK, KernelCases, KernelRow, Run
from frame import timed
from triforce_kernels.kv.gather_split import SplitChunkSource, gather_split_chunks
from triforce_kernels.weights import split_bf16
from triforce_kernels.weights.block_types import BLOCK_TYPES, F8_E4M3, HIGH_QUANTS
from triforce_kernels.weights.blocks import block_matmul
from triforce_kernels.weights.high_bits import HighBitsWeight, high_bits_matmul
from triforce_kernels.weights.split_blocks import split_matmul
from triforce_offload.kv.block_format import SplitBlocks
from triforce_offload.kv.shape import KVShape
from triforce_offload.weights.split_formats import SplitBlockMatrix, SplitFP8, SplitQuants

BLOCK_TOKENS = 1024
COPY = "copy of as many numbers"


@dataclass(frozen=True)
class SplitCases(KernelCases):
    def rows(self) -> Iterator[KernelRow]:
        for rows in (self._weights, self._blocks_of_kv, self._chunks):
            yield from rows()
            self.settle()

    def _weights(self) -> Iterator[KernelRow]:
        out, width = self.config.layers[0].mlp.width, self.config.hidden
        dense = [(self.draw(out, width) * 0.02).bfloat16() for _ in range(2)]
        weights = [split_bf16.encode(each) for each in dense]
        numbers, shape = out * width, f"{out} x {width}"
        yield self.row(
            "decode_split", shape, numbers * 7 // 2, 0.0,
            [partial(split_bf16.decode, w) for w in weights], (COPY, [d.clone for d in dense]),
        )  # fmt: skip
        if self.device.type == "cpu":
            # On a GPU the host encodes weights while they are loaded.
            runs = [partial(split_bf16.encode, d) for d in dense]
            yield self.row("split_bf16.encode", shape, numbers * 7 // 2, 0.0, runs)
        high = [HighBitsWeight.of(each) for each in weights]
        name = "product by high bits"
        yield from self.products(name, high, numbers, high_bits_matmul, dense, (1, 17))
        for form in _split_blocks(out, width):
            yield from self._joined(form, dense, shape)

    def _joined(
        self, form: SplitBlockMatrix, dense: list[torch.Tensor], shape: str
    ) -> Iterator[KernelRow]:
        """dense: matrices of as many numbers"""
        kind, width = form.block_type, form.columns
        weights = [form.view(self._bytes(form.nbytes)) for _ in dense]
        low = form.low_bytes
        if kind is F8_E4M3:
            for each, weight in zip(dense, weights, strict=True):
                weight.write(_in_fp8(each))
                low = int(weight.starts[-1])
        nbytes = low + form.high_bytes + form.rows * kind.row_bytes(width)
        yield self.row(
            f"join {kind.name}", shape, nbytes, 0.0, [weight.join for weight in weights],
            (COPY, [d.clone for d in dense]),
        )  # fmt: skip
        high, rows = [weight.high() for weight in weights], (1, 17)
        name = f"product by high bits of {kind.name}"
        yield from self.products(name, high, form.draft_bytes, block_matmul, dense, rows)
        name = f"product by split {kind.name}"
        yield from self.products(name, weights, nbytes, split_matmul, dense, rows)

    def _blocks_of_kv(self) -> Iterator[KernelRow]:
        shape, exact = self._shape, self._keys_values()
        coder = SplitBlocks(shape, self._bytes(shape.dense_block_bytes))
        buffers = [self._bytes(coder.nbytes) for _ in range(CALLS)]
        for buffer in buffers:
            if not coder.write(buffer, exact):
                raise RuntimeError("a block of random KV has no room for its exceptions")
        what, nbytes = f"{BLOCK_TOKENS} tokens of a layer", shape.numbers * 7 // 2
        runs = [partial(coder.read, b) for b in buffers]
        yield self.row("decode_kv_blocks", what, nbytes, 0.0, runs, (COPY, [exact.clone]))

        def write_all() -> None:
            for buffer in buffers:
                coder.write(buffer, exact)
            self.settle()

        # Encoding waits for the device to report whether there was room, so a graph cannot record
        # it.
        seconds = statistics.median(timed(write_all) for _ in range(self.repeats)) / CALLS
        yield self.row("encode_kv_block, its wait included", what, nbytes, 0.0, seconds)

    def _chunks(self) -> Iterator[KernelRow]:
        shape, at = self._shape, self._shape.parts
        coder = SplitBlocks(shape, self._bytes(shape.dense_block_bytes))
        block = self._bytes(coder.nbytes)
        coder.write(block, self._keys_values())
        layers, heads = len(self.config.kv_layers), self.config.attention.kv_heads
        slots = min(4096, self.context // 2) // CHUNK
        blocks = max(1, self.context // BLOCK_TOKENS)
        moves = self.moves(blocks * BLOCK_TOKENS // CHUNK, slots)
        target = torch.zeros(
            layers, 2, heads, slots, CHUNK, shape.head_dim, dtype=torch.bfloat16,
            device=self.device,
        )  # fmt: skip
        count = int((moves >= 0).sum())
        numbers = count * 2 * CHUNK * shape.head_dim

        def gathering(where: torch.Tensor) -> Run:
            addresses = torch.full((layers, blocks + 1), where.data_ptr(), device=self.device)
            source = SplitChunkSource(
                addresses, BLOCK_TOKENS, BLOCK_TOKENS, at.high, at.low, at.base
            )
            return partial(gather_split_chunks, moves, source, target)

        inputs = f"{count} chunks of {CHUNK} x {shape.head_dim}"
        yield from self.gathered(
            "gather_split_chunks", inputs, numbers * 3 // 2, numbers * 2, block, gathering
        )

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.device)

    def _keys_values(self) -> torch.Tensor:
        shape = self._shape
        return self.draw(2, shape.kv_heads, BLOCK_TOKENS, shape.head_dim).bfloat16()

    @property
    def _shape(self) -> KVShape:
        config = self.config
        return KVShape(
            len(config.kv_layers),
            config.attention.kv_heads,
            config.attention.head_dim,
            BLOCK_TOKENS,
            torch.bfloat16,
            text_tokens=self.context,
            split=True,
        )


def _split_blocks(rows: int, columns: int) -> Iterator[SplitBlockMatrix]:
    """Yield a matrix in each type of blocks that can be split, where its rows are whole blocks."""
    if columns % F8_E4M3.elements == 0:
        yield SplitFP8(rows, columns)
    for name in HIGH_QUANTS:
        if columns % BLOCK_TYPES[name].elements == 0:
            yield SplitQuants(rows, columns, BLOCK_TYPES[name])


def _in_fp8(matrix: torch.Tensor) -> torch.Tensor:
    """Return blocks of numbers whose standard deviation is 100 in FP8."""
    size = F8_E4M3.elements
    bits = (
        (matrix.float() * 5000).to(torch.float8_e4m3fn).view(torch.uint8).unflatten(1, (-1, size))
    )
    scales = torch.full((*bits.shape[:2], 1), 2e-4, device=bits.device)
    return torch.cat((bits, scales.view(torch.uint8)), 2).flatten(1)
