"""Several calls of the processor's compiled kernels, one after the other, with float32 rows.

They are described once and made again and again. Threads are called once for all of them, instead
of once for each: where matrices are small, that takes longer than multiplying.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch

from triforce_kernels.checks import require
from triforce_kernels.host.layer import NormKind, Operation
from triforce_kernels.host.library import library
from triforce_kernels.host.structures import DENSE, Call, Gate, Norm, Product
from triforce_kernels.host.weights import rounding_format, weight_struct
from triforce_kernels.limits import FEW_ROWS
from triforce_kernels.weights.linear import Weight, matrices

_F32, _SIZE = DENSE[torch.float32], 4
# As in `source/threads.h`.
_MOST_CALLS = 16


class _Kind(IntEnum):
    """As in `source/layer.c`."""

    PRODUCT, NORM, GATED = range(3)


_KINDS = {Product: _Kind.PRODUCT, Norm: _Kind.NORM, Gate: _Kind.GATED}


@dataclass(frozen=True)
class Rows:
    """Float32 rows that calls read and write: columns of a tensor that each run is given, or of
    memory that each run allocates.

    index: which tensor, or which part of the memory
    width: number of columns
    given: whether the run is given them
    """

    index: int
    width: int
    given: bool


class Sequence:
    """Calls, each with what the ones before it wrote. Holds addresses: weights must outlive it. One
    thread runs it at a time.
    """

    def __init__(self) -> None:
        self._given: list[int] = []
        self._own: list[int] = []
        self._structs: list[Product | Norm | Gate] = []
        # Where the addresses of rows go: the structure, its field, the rows, and their first byte.
        self._places: list[tuple[ctypes.Structure, str, Rows, int]] = []
        self._kept: list[object] = []
        self._calls: ctypes.Array[Call] | None = None

    def given(self, width: int) -> Rows:
        """Return rows of a tensor that each run is given, in the order of these calls."""
        self._given.append(width)
        return Rows(len(self._given) - 1, width, True)

    def own(self, width: int) -> Rows:
        """Return rows that exist during a run."""
        self._own.append(width)
        return Rows(len(self._own) - 1, width, False)

    def product(
        self,
        x: Rows,
        weight: Weight,
        out: Rows,
        bias: torch.Tensor | None = None,
        *,
        adds: bool = False,
        factor: float = 1.0,
    ) -> None:
        """Multiply by a transposed weight, which is converted as `linear` converts it.

        bias: [out], float32
        adds: whether results are added to `out`, after their product with `factor`
        Raises ValueError.
        """
        require(
            "Sequence.product",
            weight.shape == (out.width, x.width)
            and (bias is None or _is_vector(bias, out.width))
            and all(not isinstance(m, torch.Tensor) or m.stride(1) == 1 for m in matrices(weight)),
            x=x,
            out=out,
            weight=weight.shape,
            bias=bias,
        )
        first = 0
        for part in matrices(weight):
            struct = weight_struct(part)
            self._kept.append(struct)
            call = Product(
                weight=ctypes.addressof(struct),
                bias=None if bias is None else bias.data_ptr() + first * _SIZE,
                outputs=part.shape[0],
                x_stride=x.width,
                out_stride=out.width,
                rounded=rounding_format(part, torch.float32),
                adds=adds,
                factor=factor,
            )
            self._add(call, x=x, out=out, first=first)
            first += part.shape[0]

    def norm(
        self,
        x: Rows,
        weight: torch.Tensor,
        out: Rows,
        kind: NormKind,
        offset: float,
        eps: float,
        *,
        adds: bool = False,
    ) -> None:
        """Norm rows. weight: [width], float32; see `host.h`. Raises ValueError."""
        require(
            "Sequence.norm",
            _is_vector(weight, x.width) and out.width == x.width,
            x=x,
            out=out,
            weight=weight,
        )
        call = Norm(
            weight=weight.data_ptr(),
            format=_F32,
            out_format=_F32,
            kind=kind,
            heads=1,
            width=x.width,
            x_row=x.width,
            out_row=out.width,
            adds=adds,
            eps=eps,
            offset=offset,
            factor=1.0,
        )
        self._add(call, x=x, out=out)

    def gated(self, x: Rows, out: Rows, operation: Operation) -> None:
        """Multiply up projections by their activated gates, which come first in x."""
        call = Gate(format=_F32, operation=operation, width=out.width, x_row=x.width)
        self._add(call, x=x, out=out)

    def run(self, *given: torch.Tensor) -> None:
        """Make the calls. given: contiguous float32 rows [rows, width], 1 to FEW_ROWS of them"""
        if self._calls is None:
            self._calls = (Call * len(self._structs))(
                *(Call(_KINDS[type(each)], ctypes.addressof(each)) for each in self._structs)
            )
        rows = given[0].shape[0]
        own = torch.empty(rows * sum(self._own), dtype=torch.float32, device="cpu")
        starts, start = [], own.data_ptr()
        for width in self._own:
            starts.append(start)
            start += rows * width * _SIZE
        addresses = [each.data_ptr() for each in given]
        for call in self._structs:
            call.rows = rows
        for call, field, operand, first in self._places:
            base = addresses if operand.given else starts
            setattr(call, field, base[operand.index] + first)
        library().triforce_sequence(self._calls, len(self._calls), torch.get_num_threads())

    def fits(self, *given: torch.Tensor) -> bool:
        """Return whether a run takes these tensors of a CPU, which may be the first ones alone."""
        rows = given[0].shape[0]
        return 0 < rows <= FEW_ROWS and all(
            each.dtype == torch.float32 and each.shape == (rows, width) and each.is_contiguous()
            for each, width in zip(given, self._given, strict=False)
        )

    def _add(self, call: Product | Norm | Gate, *, x: Rows, out: Rows, first: int = 0) -> None:
        """first: the first column of `out` that is written"""
        if len(self._structs) == _MOST_CALLS:
            raise ValueError(f"a sequence has at most {_MOST_CALLS} calls")
        if self._calls is not None:
            raise ValueError("a sequence that has run takes no more calls")
        self._structs.append(call)
        self._places += [(call, "x", x, 0), (call, "out", out, first * _SIZE)]


def _is_vector(tensor: torch.Tensor, width: int) -> bool:
    return tensor.shape == (width,) and tensor.dtype == torch.float32 and tensor.is_contiguous()
