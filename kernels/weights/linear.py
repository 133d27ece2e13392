"""Products with a weight in any format. The caller cannot tell how the weight is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from triforce_kernels import limits, same_bits
from triforce_kernels.dispatch import HOST, backend, implementation
from triforce_kernels.weights import inputs
from triforce_kernels.weights.stored import StoredWeight

# On a CPU, half-precision products with more rows than this are made in float32.
_NARROW_ROWS = 4


@dataclass(frozen=True)
class StackedWeight(StoredWeight):
    """Matrices of different formats, one above the other, with equal numbers of columns."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def rows(self, first: int, end: int) -> Weight:
        """StoredWeight.rows."""
        found: list[Weight] = []
        for part in self.parts:
            count = part.shape[0]
            if first < count and end > 0:
                found.append(rows_of(part, max(first, 0), min(end, count)))
            first, end = first - count, end - count
        return found[0] if len(found) == 1 else StackedWeight(tuple(found))

    def dense_rows(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """StoredWeight.dense_rows."""
        above = 0
        for part in self.parts:
            for first, rows in dense_rows(part, dtype):
                yield above + first, rows
            above += part.shape[0]


Weight = torch.Tensor | StoredWeight
# Multiplies rows by some rows of a weight, and adds their bias.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [rows, in] by a transposed weight [out, in] and add bias [out]: [rows, out] in x's
    dtype.

    The first of these ways that there is:
    - few rows, or any number of rows with the same bits: a kernel of the weight's format, which
      decodes as it multiplies, up to FEW_ROWS rows at a time; or, on a processor or with the same
      bits, products whose sums have one order;
    - in float32, where the library's products in half precision would be slow (`widens`);
    - the library's product. A weight that is not dense, or of another dtype than x, is decoded some
      rows at a time.
    """
    inputs.note(x, weight)
    on_host, same = backend(x.device) == HOST, same_bits.wanted()
    rows = x.shape[0]
    if rows > 0 and (same or rows <= limits.FEW_ROWS) and x.dtype != torch.float64 and x.dim() == 2:
        if isinstance(weight, StackedWeight):
            return _stacked(x, weight, bias)
        if not isinstance(weight, torch.Tensor) and (matmul := weight.small_batch_matmul()):
            product = matmul(x, weight) if on_host else _in_groups(x, weight, matmul)
            return product if bias is None else product.add_(bias)
        if on_host or same:
            if isinstance(weight, torch.Tensor):
                return _in_one_order(x, weight, bias)
            # A processor's kernels compute in float32: numbers need not be rounded before.
            dtype = torch.float32 if on_host else x.dtype
            return _by_slices(x, weight, bias, _in_one_order, dtype)
    if widens(x.device, x.dtype, x.shape[0]):
        return _by_slices(x, weight, bias, _wide_product(x.float()), torch.float32)
    if isinstance(weight, torch.Tensor) and weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    return _by_slices(x, weight, bias, F.linear, x.dtype)


def _stacked(x: torch.Tensor, weight: StackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear`, part by part."""
    out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
    first = 0
    for part in weight.parts:
        end = first + part.shape[0]
        out[..., first:end] = linear(x, part, None if bias is None else bias[first:end])
        first = end
    return out


def _by_slices(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    product: Product,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`linear` with some rows of the weight at a time, as dense numbers.

    product: multiplies by these rows and adds their bias
    dtype: of these rows
    """
    out = None
    for first, rows in dense_rows(weight, dtype):
        end = first + rows.shape[0]
        added = None if bias is None else bias[first:end]
        if end - first == weight.shape[0]:
            return product(x, rows, added).to(x.dtype)
        if out is None:
            out = x.new_empty(*x.shape[:-1], weight.shape[0])
        out[..., first:end] = product(x, rows, added)
        # Before others are decoded.
        del rows
    return x.new_empty(*x.shape[:-1], 0) if out is None else out


def _in_groups(
    x: torch.Tensor, weight: Weight, matmul: Callable[[torch.Tensor, Weight], torch.Tensor]
) -> torch.Tensor:
    """Multiply as many rows at a time as a kernel takes."""
    if len(x) <= limits.FEW_ROWS:
        return matmul(x, weight)
    out = x.new_empty(len(x), weight.shape[0])
    for rows, into in zip(x.split(limits.FEW_ROWS), out.split(limits.FEW_ROWS), strict=True):
        into.copy_(matmul(rows, weight))
    return out


def _in_one_order(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` with a dense weight, whose sums do not depend on the number of rows."""
    product = implementation("dense_matmul", x.device)(x, weight)
    return product if bias is None else product.add_(bias)


def _wide_product(wide: torch.Tensor) -> Product:
    """Return products in float32. wide: the rows in float32"""
    return lambda x, weight, bias: F.linear(wide, weight, None if bias is None else bias.float())


def reference_dense(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def widens(device: torch.device, dtype: torch.dtype, rows: int = _NARROW_ROWS + 1) -> bool:
    """Return whether products with `rows` rows are made in float32 and then rounded.

    Without this, processors without half-precision units take several times as long.
    """
    return device.type == "cpu" and dtype.itemsize == 2 and rows > _NARROW_ROWS


def matrices(weight: Weight) -> tuple[Weight, ...]:
    """Return the matrices that stand one above the other in a weight, the first one on top."""
    return weight.parts if isinstance(weight, StackedWeight) else (weight,)


def lookup(weight: Weight, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a weight [out, in] by index [n]: [n, in], on the weight's device. Raises
    TypeError for a format that only layers use.
    """
    if isinstance(weight, torch.Tensor):
        return F.embedding(index, weight).to(dtype)
    return weight.lookup(index, dtype)


def rows_of(weight: Weight, first: int, end: int) -> Weight:
    """Return rows of a weight, as a view. Raises IndexError."""
    if end > weight.shape[0]:
        raise IndexError(f"rows {first} to {end} of {weight.shape[0]}")
    return weight[first:end] if isinstance(weight, torch.Tensor) else weight.rows(first, end)


def dense_rows(weight: Weight, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the weight as dense rows [n, in], some at a time, each with the index of the first."""
    if not isinstance(weight, torch.Tensor):
        yield from weight.dense_rows(dtype)
        return
    step = max(1, limits.DECODED_AT_ONCE // weight.shape[1])
    for first, rows in enumerate(weight.split(step)):
        yield first * step, rows.to(dtype)
