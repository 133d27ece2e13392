"""Several calls of the processor's compiled kernels, one after the other, with float32 rows.

They are described once and made again and again. Threads are called once for all of them, instead
of once for each: where matrices are small, that takes longer than multiplying.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch

from triforce_kernels.attention.dense import DenseKeys
from triforce_kernels.attention.streaming import unseen
from triforce_kernels.checks import alike, require
from triforce_kernels.host.attention import MOST_HEAD_DIM, describe_keys, describe_own, parts
from triforce_kernels.host.layer import NormKind, Operation
from triforce_kernels.host.library import library
from triforce_kernels.host.structures import (
    DENSE,
    Attention,
    Call,
    Calls,
    Count,
    Gate,
    Merge,
    Norm,
    Place,
    Product,
    Rope,
)
from triforce_kernels.host.weights import weight_struct
from triforce_kernels.limits import FEW_ROWS
from triforce_kernels.weights.linear import Weight, matrices

_F32, _SIZE = DENSE[torch.float32], 4
# As in `source/threads.h`.
_MOST_CALLS = 24


class _Kind(IntEnum):
    """As in `source/sequence.c`."""

    PRODUCT, NORM, GATED, ROPE, ATTENTION, MERGE = range(6)


_KINDS = {
    Product: _Kind.PRODUCT,
    Norm: _Kind.NORM,
    Gate: _Kind.GATED,
    Rope: _Kind.ROPE,
    Attention: _Kind.ATTENTION,
    Merge: _Kind.MERGE,
}
# The field that is the number of rows, in most calls.
_ROWS = {"rows": 1}


@dataclass(frozen=True)
class Rows:
    """Float32 rows that calls read and write: of a tensor that each run is given, or in memory that
    each run allocates.

    base: 0 for the run's own memory, else which of the tensors that it is given, from 1
    width: number of columns
    before: number of columns of the rows that come before these in the run's own memory
    """

    base: int
    width: int
    before: int = 0


class Sequence:
    """Calls, each with what the ones before it wrote. Holds addresses: weights must outlive it. One
    thread runs it at a time.
    """

    def __init__(self) -> None:
        self._given: list[int] = []
        # Columns of the run's own memory that are in use, and the most that were.
        self._own = self._most = 0
        self._structs: list[ctypes.Structure] = []
        self._places: list[Place] = []
        self._counts: list[Count] = []
        self._kept: list[object] = []
        self._attention: tuple[Rope, Attention] | None = None
        # What the last run read by its address.
        self._read: tuple[torch.Tensor | None, ...] = ()
        self._calls: Calls | None = None

    def given(self, width: int) -> Rows:
        """Return rows of a tensor that each run is given, in the order of these calls."""
        self._given.append(width)
        return Rows(len(self._given), width)

    def own(self, width: int) -> Rows:
        """Return rows that exist during a run, at least until `drop`."""
        before = self._own
        self._own += width
        self._most = max(self._most, self._own)
        return Rows(0, width, before)

    def drop(self, after: Rows) -> None:
        """Let what comes next take the memory of all rows after these: no call reads them any more.

        after: of the run's own memory
        """
        self._own = after.before + after.width

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
        """Multiply by a transposed weight, as `linear` does.

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
                adds=adds,
                factor=factor,
            )
            self._add(call, _ROWS, x=x, out=(out, first))
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
        heads: int | None = None,
        first: int = 0,
    ) -> None:
        """Norm rows, or heads of them, each as wide as the weight.

        weight: [width], float32; see `host.h`
        heads, first: number of heads, and column of the first one, in x and in `out`; None for
            whole rows

        Raises ValueError.
        """
        width = weight.shape[0]
        require(
            "Sequence.norm",
            _is_vector(weight, width)
            and out.width == x.width
            and (x.width == width if heads is None else 0 <= first <= x.width - heads * width),
            x=x,
            out=out,
            weight=weight,
            heads=heads,
            first=first,
        )
        call = Norm(
            weight=weight.data_ptr(),
            format=_F32,
            out_format=_F32,
            kind=kind,
            heads=heads or 1,
            width=width,
            x_row=x.width,
            x_head=width,
            out_row=out.width,
            out_head=width,
            adds=adds,
            eps=eps,
            offset=offset,
            factor=1.0,
        )
        self._add(call, _ROWS, x=(x, first), out=(out, first))

    def gated(self, x: Rows, out: Rows, operation: Operation) -> None:
        """Multiply up projections by their activated gates, which come first in x."""
        call = Gate(format=_F32, operation=operation, width=out.width, x_row=x.width)
        self._add(call, _ROWS, x=x, out=out)

    def attention(self, qkv: Rows, out: Rows, heads: int, kv_heads: int, head_dim: int) -> None:
        """Rotate queries and keys, write keys and values to those that a run is given, and attend.

        qkv: queries, keys and values; see `attend_dense`
        out: columns of the heads, one after the other

        Raises ValueError.
        """
        require(
            "Sequence.attention",
            kv_heads > 0
            and heads % kv_heads == 0
            and 0 < head_dim <= MOST_HEAD_DIM
            and qkv.width == (heads + 2 * kv_heads) * head_dim
            and out.width == heads * head_dim
            and self._attention is None,
            qkv=qkv,
            out=out,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )
        group, splits = heads // kv_heads, parts(kv_heads)
        rope = Rope(
            format=_F32,
            heads=heads + 2 * kv_heads,
            queries=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            x_row=qkv.width,
            x_head=head_dim,
        )
        attention = Attention(
            heads=kv_heads,
            head_dim=head_dim,
            splits=splits,
            fresh=True,
            query_row=head_dim,
            scale=head_dim**-0.5,
        )
        merge = Merge(attention=ctypes.addressof(attention), out_head=head_dim, out_token=out.width)
        query = self.own(heads * head_dim)
        self._add(rope, {"tokens": 1}, x=qkv, out=query)
        self._add(
            attention,
            {"rows": group, "query_head": group * head_dim},
            query=query,
            acc=self.own(splits * heads * head_dim),
            peak=self.own(splits * heads),
            total=self.own(splits * heads),
        )
        self._add(merge, {"tokens": 1}, out=out)
        self._attention = rope, attention

    def run(
        self,
        *given: torch.Tensor,
        keys: DenseKeys | None = None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        visible: torch.Tensor | None = None,
    ) -> None:
        """Make the calls.

        given: contiguous float32 rows [rows, width], 1 to FEW_ROWS of them
        keys, rotation, visible: as for `attend_dense`, if there is an attention; float32

        Raises ValueError for keys, cosines or sines that do not fit.
        """
        if self._calls is None:
            self._calls = self._closed()
        rows = given[0].shape[0]
        if self._attention is not None:
            self._describe(rows, keys, rotation, visible)
        own = torch.empty(rows * self._most, dtype=torch.float32, device="cpu")
        bases = (ctypes.c_void_p * (len(given) + 1))(
            own.data_ptr(), *(each.data_ptr() for each in given)
        )
        threads = torch.get_num_threads()
        library().triforce_sequence(ctypes.byref(self._calls), bases, rows, threads)

    def fits(self, *given: torch.Tensor) -> bool:
        """Return whether a run takes these tensors of a CPU, which may be the first ones alone."""
        rows = given[0].shape[0]
        return 0 < rows <= FEW_ROWS and all(
            each.dtype == torch.float32 and each.shape == (rows, width) and each.is_contiguous()
            for each, width in zip(given, self._given, strict=False)
        )

    def reads(self, keys: DenseKeys) -> bool:
        """Return whether an attention of a run may be to these keys of a CPU."""
        return (
            keys.key.dtype == torch.float32
            and keys.scale is None
            and not isinstance(keys.start, torch.Tensor)
        )

    def _describe(
        self,
        rows: int,
        keys: DenseKeys,
        rotation: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor | None,
    ) -> None:
        """Describe what an attention of a run reads besides its rows."""
        rope, attention = self._attention
        key, value, start = keys.key, keys.value, keys.start
        end, drafted = start + rows, rows if visible is None else visible.shape[1]
        size = attention.head_dim
        require(
            "Sequence.run",
            key.shape == value.shape == (attention.heads, key.shape[1], size)
            and key.stride(2) == value.stride(2) == 1
            and all(each.shape == (rows, size) for each in rotation)
            and alike(key, value, *rotation)
            and self.reads(keys)
            and 0 <= start <= key.shape[1] - rows
            and rows <= drafted <= end
            and (visible is None or (visible.shape, visible.dtype) == ((rows, drafted), torch.bool))
            and (visible is None or visible.is_contiguous()),
            key=key,
            value=value,
            start=start,
            rows=rows,
            cos=rotation[0],
            visible=visible,
        )
        cos, sin = (each.contiguous() for each in rotation)
        rope.cos, rope.sin, rope.start = cos.data_ptr(), sin.data_ptr(), start
        rope.key, rope.value = key.data_ptr(), value.data_ptr()
        rope.key_head, rope.key_row = key.stride()[:2]
        rope.value_head, rope.value_row = value.stride()[:2]
        window = keys.window or 0
        hidden = unseen(end, drafted, window) if window else 0
        seen = slice(hidden, end)
        describe_keys(attention, key[None, :, seen], value[None, :, seen], keys.first + hidden)
        describe_own(attention, rows, window if window < end else 0, visible)
        self._read = cos, sin, visible

    def _closed(self) -> Calls:
        """Return the description of all calls."""
        calls = (Call * len(self._structs))(
            *(Call(_KINDS[type(each)], ctypes.addressof(each)) for each in self._structs)
        )
        places = (Place * len(self._places))(*self._places)
        counts = (Count * len(self._counts))(*self._counts)
        self._kept += calls, places, counts
        addresses = (ctypes.addressof(each) for each in (calls, places, counts))
        return Calls(*addresses, len(calls), len(places), len(counts))

    def _add(
        self,
        call: ctypes.Structure,
        counts: Mapping[str, int],
        **rows: Rows | tuple[Rows, int],
    ) -> None:
        """counts: fields that are a number of rows, and how many times that number
        rows: fields that are addresses of rows, with their first column if that is not 0
        """
        if len(self._structs) == _MOST_CALLS:
            raise ValueError(f"a sequence has at most {_MOST_CALLS} calls")
        if self._calls is not None:
            raise ValueError("a sequence that has run takes no more calls")
        self._structs.append(call)
        self._counts += (Count(_field(call, name), times) for name, times in counts.items())
        for name, operand in rows.items():
            own, first = operand if isinstance(operand, tuple) else (operand, 0)
            self._places.append(Place(_field(call, name), own.base, own.before, first * _SIZE))


def _field(call: ctypes.Structure, name: str) -> int:
    """Return the address of a field of a structure."""
    return ctypes.addressof(call) + getattr(type(call), name).offset


def _is_vector(tensor: torch.Tensor, width: int) -> bool:
    return tensor.shape == (width,) and tensor.dtype == torch.float32 and tensor.is_contiguous()
