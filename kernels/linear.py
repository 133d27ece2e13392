"""Products with a weight, whatever its format. What computes cannot tell how it is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from . import halves, int4, limits, planes, upper
from .blocks import BlockWeight, block_matmul, decode, has_kernel
from .dispatch import TRITON, backend
from .halves import HalfWeight
from .int4 import Int4Weight, int4_matmul
from .planes import PlaneWeight, plane_matmul
from .upper import UpperWeight, upper_matmul

# On a CPU, products of half precision with more rows than this are made in float32.
_NARROW_ROWS = 4


@dataclass(frozen=True)
class StackedWeight:
    """Matrices of different formats, one above the other: as many columns, each its rows."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


# Of numbers that are read exactly or by their upper planes.
SplitWeight = PlaneWeight | HalfWeight
Weight = torch.Tensor | BlockWeight | Int4Weight | SplitWeight | UpperWeight | StackedWeight


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times a weight [out, in], transposed, plus bias [out]: [rows, out] in x's dtype.

    What is not dense is decoded to x's dtype some rows at a time: the result is that of the dense
    matrix of the same numbers.
    """
    wide = widens(x.device, x.dtype, x.shape[0])
    if isinstance(weight, torch.Tensor) and not wide:
        return F.linear(x, weight, bias)
    few = x.shape[0] <= limits.FEW_ROWS
    if few and (matmul := _own_product(weight, x.device)):
        product = matmul(x, weight)
        return product if bias is None else product.add_(bias)
    out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
    if few and isinstance(weight, StackedWeight):
        first = 0
        for part in weight.parts:
            end = first + part.shape[0]
            out[..., first:end] = linear(x, part, None if bias is None else bias[first:end])
            first = end
        return out
    computed = torch.float32 if wide else x.dtype
    left, added = x.to(computed), None
    for first, rows in dense_rows(weight, x.dtype):
        end = first + rows.shape[0]
        if bias is not None:
            added = bias[first:end].to(computed)
        out[..., first:end] = F.linear(left, rows.to(computed), added)
    return out


def _own_product(weight: Weight, device: torch.device) -> Callable | None:
    """What multiplies few rows with a weight as it is stored, if that is to be."""
    match weight:
        case Int4Weight():
            return int4_matmul
        case UpperWeight():
            return upper_matmul
        # Without a kernel these are decoded, and multiply as the dense matrix does to the last bit.
        case PlaneWeight() if backend(device) == TRITON:
            return plane_matmul
        case BlockWeight() if has_kernel(weight.kind, device):
            return block_matmul
    return None


def widens(device: torch.device, dtype: torch.dtype, rows: int = _NARROW_ROWS + 1) -> bool:
    """Whether products with so many rows are made in float32 and rounded then.

    Processors without half-precision units take several times as long otherwise.
    """
    return device.type == "cpu" and dtype.itemsize == 2 and rows > _NARROW_ROWS


def lookup(weight: Weight, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a weight [out, in], by index [n]: [n, in], where the weight is."""
    if isinstance(weight, torch.Tensor):
        return F.embedding(index, weight).to(dtype)
    if isinstance(weight, BlockWeight):
        return decode(weight.data[index], weight.kind, dtype)
    if isinstance(weight, PlaneWeight):
        return planes.decode_rows(weight, index).to(dtype)
    if isinstance(weight, HalfWeight):
        return halves.join_rows(weight, index).to(dtype)
    raise TypeError(f"rows of a {type(weight).__name__} are not looked up")


def rows_of(
    weight: Weight, first: int, end: int
) -> torch.Tensor | BlockWeight | Int4Weight | SplitWeight:
    """Some rows of a weight, which lie in one part of it; a view."""
    if isinstance(weight, StackedWeight):
        for part in weight.parts:
            if first < part.shape[0]:
                return rows_of(part, first, end)
            first, end = first - part.shape[0], end - part.shape[0]
        raise IndexError(f"row {first} behind the last")
    if end > weight.shape[0]:
        raise IndexError(f"rows {first} to {end} of {weight.shape[0]}")
    if isinstance(weight, BlockWeight):
        return replace(weight, data=weight.data[first:end])
    if isinstance(weight, Int4Weight | SplitWeight):
        return weight.rows(first, end)
    return weight[first:end]


def dense_rows(weight: Weight, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """The weight as dense rows [n, in], some at a time, each with the index of its first row."""
    if isinstance(weight, StackedWeight):
        above = 0
        for part in weight.parts:
            for first, rows in dense_rows(part, dtype):
                yield above + first, rows
            above += part.shape[0]
    elif isinstance(weight, BlockWeight):
        for first in range(0, weight.shape[0], weight.rows_at_once):
            data = weight.data[first : first + weight.rows_at_once]
            yield first, decode(data, weight.kind, dtype)
    elif isinstance(weight, SplitWeight):
        for first, part in weight.slices():
            yield first, joined(part).to(dtype)
    elif isinstance(weight, UpperWeight):
        for first, part in weight.slices():
            yield first, upper.decode(part).to(dtype)
    elif isinstance(weight, Int4Weight):
        for first, rows in int4.dense_rows(weight):
            yield first, rows.to(dtype)
    else:
        step = max(1, limits.DECODED_AT_ONCE // weight.shape[1])
        for first, rows in enumerate(weight.split(step)):
            yield first * step, rows.to(dtype)


def joined(weight: SplitWeight) -> torch.Tensor:
    """The matrix that is in planes, exactly: [out, in] bfloat16, or float16."""
    return planes.decode(weight) if isinstance(weight, PlaneWeight) else halves.join(weight)
