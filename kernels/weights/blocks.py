"""Matrices in blocks of a few bits per number, of GGUF and FP8, and how they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.nn.functional as F

from triforce_kernels import limits
from triforce_kernels.checks import require
from triforce_kernels.dispatch import HOST, REFERENCE, TRITON, backend, implementation
from triforce_kernels.weights import high_quants
from triforce_kernels.weights.block_types import (
    HIGH_QUANTS,
    HIGH_TYPES,
    INTEGERS,
    NARROW,
    OF_INTEGERS,
    WITH_TABLES,
    BlockType,
)
from triforce_kernels.weights.stored import StoredWeight

# Types that kernels decode, on a GPU and on a CPU.
FUSED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", *WITH_TABLES, "MXFP4"),
    *("F8_E4M3", *(high.name for high in HIGH_TYPES.values())),
    *("NVFP4", *(kind.name for kind in OF_INTEGERS)),
)
_BY = {
    TRITON: frozenset(FUSED),
    HOST: frozenset((*FUSED, *(kind.name for kind in NARROW.values()))),
    REFERENCE: frozenset(),
}


@dataclass(frozen=True)
class BlockWeight(StoredWeight):
    """A matrix [rows, columns], stored row by row in blocks.

    data: [rows, bytes of a row] uint8
    """

    data: torch.Tensor
    kind: BlockType
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.columns

    @property
    def device(self) -> torch.device:
        return self.data.device

    def rows(self, first: int, end: int) -> BlockWeight:
        """StoredWeight.rows."""
        return replace(self, data=self.data[first:end])

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows. Raise NoDecoderError."""
        numbers = limits.DECODED_AT_ONCE
        if backend(self.device) == TRITON and has_kernel(self.kind, self.device):
            numbers = limits.DECODED_BYTES_ON_GPU // dtype.itemsize
        step = max(1, numbers // self.columns)
        for first, rows in enumerate(self.data.split(step)):
            yield first * step, decode(rows, self.kind, dtype)

    def lookup(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """StoredWeight.lookup. Raise NoDecoderError."""
        return decode(self.data[index], self.kind, dtype)

    def small_batch_matmul(self) -> Callable[[torch.Tensor, BlockWeight], torch.Tensor] | None:
        """StoredWeight.small_batch_matmul."""
        return block_matmul if has_kernel(self.kind, self.device) else None

    @property
    def experts_kernel(self) -> str | None:
        """StoredWeight.experts_kernel."""
        return "block_experts" if has_kernel(self.kind, self.device) else None


class NoDecoderError(RuntimeError):
    """No installed package decodes a block type."""


def can_decode(kind: BlockType, device: torch.device) -> bool:
    """Return whether a block type can be decoded here."""
    return kind.name in _OWN or has_kernel(kind, device) or _library(kind) is not None


def has_kernel(kind: BlockType, device: torch.device) -> bool:
    """Return whether a kernel on this device decodes a block type, alone and within a product."""
    return kind.name in _BY[backend(device)]


def decode(data: torch.Tensor, kind: BlockType, dtype: torch.dtype) -> torch.Tensor:
    """Decode rows [n, bytes] uint8 to float32, then convert to `dtype`: [n, columns].

    Raises NoDecoderError.
    """
    if has_kernel(kind, data.device):
        return implementation("decode_blocks", data.device)(data.contiguous(), kind, dtype)
    return reference_decode(data, kind, dtype)


def block_matmul(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
    """Multiply x [rows, in] by the transposed weight: [rows, out] in x's dtype, summed in float32.

    Meant for few rows, up to about 64, where reading the weight takes most of the time. Raises
    ValueError or NoDecoderError.
    """
    require(
        "block_matmul",
        x.dim() == 2
        and x.shape[1] == weight.columns
        and x.shape[0] > 0
        and x.stride(1) == 1
        and weight.data.is_contiguous()
        and weight.data.shape[1] == weight.kind.row_bytes(weight.columns)
        and x.device == weight.device,
        x=x,
        data=weight.data,
        kind=weight.kind,
    )
    run = reference_matmul
    if has_kernel(weight.kind, x.device):
        run = implementation("block_matmul", x.device)
    return run(x, weight.data, weight.kind)


def reference_decode(data: torch.Tensor, kind: BlockType, dtype: torch.dtype) -> torch.Tensor:
    if (own := _OWN.get(kind.name)) is not None:
        numbers = own(data.reshape(-1, kind.nbytes))
    elif (library := _library(kind)) is not None:
        numbers = library(data.reshape(-1), kind.number)
    else:
        raise NoDecoderError(f"{kind.name} weights need transformers 5.23 or newer")
    return numbers.reshape(data.shape[0], -1).to(dtype)


def reference_matmul(x: torch.Tensor, data: torch.Tensor, kind: BlockType) -> torch.Tensor:
    return F.linear(x, reference_decode(data, kind, x.dtype))


@cache
def _library(kind: BlockType) -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """Return what decodes a block type in transformers; None if this version does not."""
    try:
        from transformers.integrations.gguf.dequant import dequantize

        # Older versions decode some types only.
        dequantize(torch.zeros(kind.nbytes, dtype=torch.uint8), kind.number)
    except (ImportError, ValueError):
        return None
    return dequantize


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the half-precision number at byte `start` of each block, [blocks, 1] float32."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _fives(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return numbers of 5 bits: 32 high bits at a byte of each block, then 16 bytes of low bits."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, start : start + 4, None] >> bits & 1).flatten(1)
    low = blocks[:, start + 4 : start + 20]
    return (torch.cat((low & 15, low >> 4), 1) | high << 4).float()


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_fives(blocks, 2) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _fives(blocks, 4) + _half(blocks, 2)


def _f8_e4m3(blocks: torch.Tensor) -> torch.Tensor:
    numbers = blocks[:, :128].view(torch.float8_e4m3fn).float()
    return numbers * blocks[:, 128:].contiguous().view(torch.float32)


def _f8_high(blocks: torch.Tensor) -> torch.Tensor:
    codes, signs = f8_high_parts(blocks)
    levels = torch.tensor(F8_LEVELS, device=blocks.device)[codes.int()]
    scales = blocks[:, :4].contiguous().view(torch.float32)
    return torch.where(signs == 1, -levels, levels) * scales


def f8_high_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the code of each number of blocks of F8_HIGH [..., 84], and its sign, 0 or 1: [...,
    128] uint8 each (`split_fp8`).
    """
    bit = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    signs = (blocks[..., 4:20].unsqueeze(-1) >> bit & 1).flatten(-2)
    halves = blocks[..., 20:].unflatten(-1, (2, 1, 32))
    return torch.cat((halves & 15, halves >> 4), -2).flatten(-3), signs


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Numbers are twice those that the format defines, and scales half of them, so that the
    smallest scale is a normal number.
    """
    codes = torch.cat((blocks[:, 1:] & 15, blocks[:, 1:] >> 4), 1)
    doubled = torch.tensor(_DOUBLED, device=blocks.device)[codes.long()]
    return torch.ldexp(doubled, blocks[:, :1].int() - 128)


def _int4(blocks: torch.Tensor, elements: int) -> torch.Tensor:
    words = blocks[:, :4].contiguous().view(torch.int32)
    integers = blocks[:, 4:].unflatten(1, (-1, 1, min(32, elements // 2)))
    integers = torch.cat((integers & 15, integers >> 4), 2).flatten(1).int()
    return (integers - (words & 255)).float() * (words & ~255).view(torch.float32)


def _int8(blocks: torch.Tensor) -> torch.Tensor:
    words = blocks[:, :4].contiguous().view(torch.int32)
    return (blocks[:, 4:].int() - (words & 255)).float() * (words & ~255).view(torch.float32)


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Numbers are twice those that the format defines, and factors half of them."""
    factors = blocks[:, :4].contiguous().view(torch.float32) * 0.5
    scales = blocks[:, 4:12].view(torch.float8_e4m3fn).float() * factors
    codes = blocks[:, 12:].unflatten(1, (2, 1, 32))
    codes = torch.cat((codes & 15, codes >> 4), 2).flatten(1)
    doubled = torch.tensor(_DOUBLED, device=blocks.device)[codes.long()]
    return doubled * scales.repeat_interleave(16, 1)


# What the codes of F8_HIGH stand for.
F8_LEVELS = [2.0, 6, 9, 13, 17, 21, 25, 29, 34, 42, 50, 58, 68, 84, 100, 116]
_DOUBLED = [0.0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12]
# Block types that transformers does not decode.
_OWN = {
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "F8_E4M3": _f8_e4m3,
    "F8_HIGH": _f8_high,
    **{high.name: partial(high_quants.decode, kind=kind) for kind, high in HIGH_QUANTS.items()},
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    **{kind.name: partial(_int4, elements=size) for size, kind in INTEGERS[4].items()},
    **{kind.name: _int8 for kind in INTEGERS[8].values()},
    "BF16": lambda blocks: blocks.view(torch.bfloat16).float(),
    "F16": lambda blocks: blocks.view(torch.float16).float(),
}
