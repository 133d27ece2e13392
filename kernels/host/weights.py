"""Products with weights in any format, and their decoding, by the processor's compiled kernels.

A product sums in float32, in an order that depends on the number of columns alone: a row has the
same bits whatever rows stand beside it, and however many threads compute.
"""

from __future__ import annotations

import ctypes
from functools import cache, singledispatch

import torch

from triforce_kernels.checks import require
from triforce_kernels.host.library import library
from triforce_kernels.host.structures import (
    DENSE,
    FORMATS,
    JoinedFP8,
    JoinedQuants,
    Product,
    Weight,
)
from triforce_kernels.limits import FEW_ROWS
from triforce_kernels.weights import split_quants as quants
from triforce_kernels.weights.block_types import (
    F8_E4M3,
    F8_HIGH,
    HIGH_QUANTS,
    WITH_TABLES,
    BlockType,
)
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.grids import grid
from triforce_kernels.weights.high_bits import HighBitsWeight
from triforce_kernels.weights.integers import IntegerWeight
from triforce_kernels.weights.split_bf16 import SplitBF16Weight, SplitError, reference_decode
from triforce_kernels.weights.split_experts import SplitExpertsWeight
from triforce_kernels.weights.split_fp8 import CANNOT_SCALE, Parts, SplitFP8Weight
from triforce_kernels.weights.stored import StoredWeight


def computes(dtype: torch.dtype) -> bool:
    """Return whether the kernels compute with rows of a dtype."""
    return dtype in DENSE


def dense_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product with dense numbers (`linear`)."""
    require(
        "dense_matmul",
        x.dim() == weight.dim() == 2
        and x.shape[1] == weight.shape[1]
        and computes(x.dtype)
        and computes(weight.dtype)
        and x.device == weight.device,
        x=x,
        weight=weight,
    )
    return _product(x, weight if weight.stride(1) == 1 else weight.contiguous())


def block_matmul(x: torch.Tensor, data: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """`blocks.block_matmul`."""
    return _multiplied(x, _blocks(data, kind), data.shape[0])


def decode_blocks(data: torch.Tensor, kind: BlockType, dtype: torch.dtype) -> torch.Tensor:
    """`blocks.decode`."""
    return _decoded(_blocks(data, kind), len(data)).to(dtype)


def split_matmul(x: torch.Tensor, weight: SplitBF16Weight) -> torch.Tensor:
    """`split_bf16.split_matmul`."""
    return _product(x, weight)


def decode_split(weight: SplitBF16Weight, index: torch.Tensor | None) -> torch.Tensor:
    """`split_bf16.decode`; single rows are decoded by the reference."""
    if index is not None:
        return reference_decode(weight, index)
    # The upper halves of the float32 numbers: a conversion would change NaN.
    numbers = _decoded(_split(weight), weight.shape[0])
    return numbers.view(torch.bfloat16)[:, 1::2].contiguous()


def high_bits_matmul(x: torch.Tensor, weight: HighBitsWeight) -> torch.Tensor:
    """`high_bits.high_bits_matmul`."""
    return _product(x, weight)


def join_fp8(weight: SplitFP8Weight) -> torch.Tensor:
    """`split_fp8.join`."""
    (rows, blocks), room = weight.bases.shape, len(weight.low)
    out = torch.empty(rows, blocks * F8_E4M3.nbytes, dtype=torch.uint8)
    parts = (weight.data, weight.bases, weight.low, weight.starts, out)
    call = JoinedFP8(*(part.data_ptr() for part in parts), rows, blocks, room)
    library().triforce_join_fp8(ctypes.byref(call), torch.get_num_threads())
    return out


def split_fp8(blocks: torch.Tensor) -> Parts:
    """`split_fp8.split`. Raise SplitError."""
    rows, count = blocks.shape[0], blocks.shape[1] // F8_E4M3.nbytes
    data = torch.empty(rows, count * F8_HIGH.nbytes, dtype=torch.uint8)
    bases = torch.empty(rows, count, dtype=torch.uint8)
    # A number has 7 bits at most.
    low = torch.empty(rows * count * F8_E4M3.elements, dtype=torch.uint8)
    starts = torch.empty(rows + 1, dtype=torch.int32)
    blocks = blocks.contiguous()
    parts = (data, bases, low, starts, blocks)
    call = JoinedFP8(*(part.data_ptr() for part in parts), rows, count, len(low))
    if (used := library().triforce_split_fp8(ctypes.byref(call))) < 0:
        raise SplitError(CANNOT_SCALE)
    return Parts(data, bases, low[:used], starts)


def join_quants(data: torch.Tensor, low: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """`split_quants.SplitQuantsWeight.join`."""
    of_row = data.shape[1] // HIGH_QUANTS[kind.name].nbytes
    out = data.new_empty(len(data), of_row * kind.nbytes)
    call = _joined_quants(data, low, out, len(data) * of_row, kind)
    library().triforce_join_quants(ctypes.byref(call), torch.get_num_threads())
    return out


def split_quants(blocks: torch.Tensor, kind: BlockType) -> quants.Parts:
    """`split_quants.reference_split`."""
    rows, count = blocks.shape[0], blocks.shape[1] // kind.nbytes
    data = blocks.new_empty(rows, count * HIGH_QUANTS[kind.name].nbytes)
    low = blocks.new_empty(rows, count * quants.LOW_BYTES[kind.name])
    blocks = blocks.contiguous()
    call = _joined_quants(data, low, blocks, rows * count, kind)
    library().triforce_split_quants(ctypes.byref(call))
    return quants.Parts(data, low)


def _joined_quants(
    data: torch.Tensor, low: torch.Tensor, out: torch.Tensor, count: int, kind: BlockType
) -> JoinedQuants:
    places = (part.data_ptr() for part in (data, low, out))
    return JoinedQuants(*places, count, FORMATS[kind.name])


def integer_matmul(x: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    """`integers.integer_matmul`."""
    return _product(x, weight)


@singledispatch
def weight_struct(weight: torch.Tensor | StoredWeight) -> Weight:
    """Return what the kernels take of a weight in any format but a stack. It holds addresses, so
    the weight must outlive it. Raise TypeError for other formats.
    """
    raise TypeError(f"no kernel of the processor multiplies by a {type(weight).__name__}")


def has_struct(weight: torch.Tensor | StoredWeight) -> bool:
    """Return whether `weight_struct` takes a weight."""
    return weight_struct.dispatch(type(weight)) is not weight_struct.dispatch(object)


@weight_struct.register
def _dense(weight: torch.Tensor) -> Weight:
    stride = weight.stride(0) * weight.itemsize
    return Weight(DENSE[weight.dtype], weight.shape[1], stride, weight.data_ptr())


@weight_struct.register
def _of_blocks(weight: BlockWeight) -> Weight:
    return _blocks(weight.data, weight.kind)


@weight_struct.register
def _split(weight: SplitBF16Weight) -> Weight:
    high = weight.high
    found = Weight(FORMATS["SPLIT_BF16"], high.shape[1], high.stride(0), high.data_ptr())
    found.low, found.base = weight.low.data_ptr(), weight.base.data_ptr()
    found.places, found.patterns = weight.places.data_ptr(), weight.patterns.data_ptr()
    found.room, found.starts = len(weight.places), weight.starts.data_ptr()
    found.groups, found.first = len(weight.starts), weight.first
    return found


@weight_struct.register
def _split_experts(weight: SplitExpertsWeight) -> Weight:
    found = _split(weight.expert(0))
    found.apart = weight.apart
    return found


@weight_struct.register
def _high_bits(weight: HighBitsWeight) -> Weight:
    high = weight.high
    found = Weight(FORMATS["HIGH_BF16"], high.shape[1], high.stride(0), high.data_ptr())
    found.base = weight.base.data_ptr()
    return found


@weight_struct.register
def _integers(weight: IntegerWeight) -> Weight:
    packed, scale = weight.packed, weight.scale
    form = FORMATS[f"INT{weight.bits}"]
    found = Weight(form, weight.shape[1], packed.stride(0), packed.data_ptr())
    found.scale, found.offset = scale.data_ptr(), weight.offset.data_ptr()
    found.group, found.scale_format = weight.group, DENSE[scale.dtype]
    found.scale_stride = scale.stride(0)
    return found


@cache
def _fill_grid(name: str) -> None:
    """Give the kernels the table of a block type, once."""
    words = grid(name, torch.device("cpu"))
    library().triforce_fill_grid(FORMATS[name], words.data_ptr(), len(words))


def _blocks(data: torch.Tensor, kind: BlockType) -> Weight:
    if kind.name in WITH_TABLES:
        _fill_grid(kind.name)
    columns = data.shape[1] // kind.nbytes * kind.elements
    return Weight(FORMATS[kind.name], columns, data.stride(0), data.data_ptr())


def _product(x: torch.Tensor, weight: torch.Tensor | StoredWeight) -> torch.Tensor:
    return _multiplied(x, weight_struct(weight), weight.shape[0])


def _multiplied(x: torch.Tensor, weight: Weight, outputs: int) -> torch.Tensor:
    """Return x [rows, columns] times a transposed weight: [rows, outputs] in x's dtype."""
    wide = x if x.dtype == torch.float32 else x.float()
    if wide.stride(1) != 1:
        wide = wide.contiguous()
    rows, step = wide.shape[0], wide.stride(0)
    out = wide.new_empty(rows, outputs)
    found, threads = library(), torch.get_num_threads()
    # Addresses, since a view of each part would take as long as a small product.
    read, written, size = wide.data_ptr(), out.data_ptr(), wide.itemsize
    for first in range(0, rows, FEW_ROWS):
        product = Product(
            ctypes.addressof(weight),
            read + first * step * size,
            written + first * outputs * size,
            None,
            min(FEW_ROWS, rows - first),
            outputs,
            step,
            outputs,
            factor=1.0,
        )
        found.triforce_product(ctypes.byref(product), threads)
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def _decoded(weight: Weight, rows: int) -> torch.Tensor:
    """Return `rows` rows of a weight, [rows, columns] float32."""
    out = torch.empty(rows, weight.columns, dtype=torch.float32, device="cpu")
    found = library()
    found.triforce_decode(ctypes.byref(weight), rows, out.data_ptr(), torch.get_num_threads())
    return out
