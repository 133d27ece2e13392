"""`streams` on a GPU: one program for some columns of a row. Rounds where the reference does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv

_COLUMNS = 512


@triton.jit
def _sigmoid(x, item: tl.constexpr):
    return (1.0 / (1.0 + tl.exp(-x))).to(item).to(tl.float32)


@triton.jit
def _silu_kernel(sums, out, numbers, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = place < numbers
    item = out.dtype.element_ty
    mean = tl.load(sums + place, mask=inside, other=0.0).to(tl.float32) / COUNT
    mean = mean.to(item).to(tl.float32)
    tl.store(out + place, (mean / (1.0 + tl.exp(-mean))).to(item), mask=inside)


def silu_of_mean(sums: torch.Tensor, count: int) -> torch.Tensor:
    out = torch.empty_like(sums)
    numbers = sums.numel()
    _silu_kernel[(cdiv(numbers, _COLUMNS),)](
        sums, out, numbers, COUNT=count, COLUMNS=_COLUMNS, num_warps=4
    )
    return out


@triton.jit
def _mean_kernel(gates, normed, out, width, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    item = out.dtype.element_ty
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for stream in tl.static_range(COUNT):
        place = (row * COUNT + stream) * width + column
        gate = tl.load(gates + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(normed + place, mask=inside, other=0.0).to(tl.float32)
        total += (_sigmoid(gate, item) * value).to(item).to(tl.float32)
    tl.store(out + row * width + column, (total / COUNT).to(item), mask=inside)


def mean_of_gated(gates: torch.Tensor, normed: torch.Tensor, count: int) -> torch.Tensor:
    rows, width = gates.shape[0], gates.shape[1] // count
    out = normed.new_empty(rows, width)
    _mean_kernel[(rows, cdiv(width, _COLUMNS))](
        gates, normed, out, width, COUNT=count, COLUMNS=_COLUMNS, num_warps=4
    )
    return out


@triton.jit
def _add_kernel(streams, sums, output, width, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    item = streams.dtype.element_ty
    added = tl.load(output + row * width + column, mask=inside, other=0.0).to(tl.float32)
    for stream in tl.static_range(COUNT):
        mean = tl.load(sums + row * COUNT + stream).to(tl.float32) / COUNT
        weight = 2.0 * _sigmoid(mean.to(item).to(tl.float32), item)
        place = streams + (row * COUNT + stream) * width + column
        before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (before + (added * weight).to(item).to(tl.float32)).to(item), mask=inside)


def add_to_streams(streams: torch.Tensor, sums: torch.Tensor, output: torch.Tensor) -> None:
    rows, width = output.shape
    _add_kernel[(rows, cdiv(width, _COLUMNS))](
        streams, sums, output, width, COUNT=sums.shape[1], COLUMNS=_COLUMNS, num_warps=4
    )
