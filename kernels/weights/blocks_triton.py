"""`blocks` on a GPU: decoding, and products with few rows that decode the weight as they read it.

Both process a row in steps (`block_steps_triton`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.checks import require
from triforce_kernels.counts import cdiv
from triforce_kernels.weights.block_steps_triton import SHAPES, step_of
from triforce_kernels.weights.block_types import OF_INTEGERS, WITH_TABLES, BlockType
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.depth_triton import divided, part_of, steps_together
from triforce_kernels.weights.grids import grid
from triforce_kernels.weights.tiles import Tiles
from triforce_kernels.weights.tiles_triton import launched, tile_of

# Blocks of these types begin at multiples of 4 bytes, and all others at even addresses.
_BEGIN_AT_FOURS = ("Q2_K", "Q4_K", "Q5_K", "Q5_K_HIGH", "F8_E4M3", "F8_HIGH", "NVFP4")
_BEGIN_AT_FOURS += tuple(kind.name for kind in OF_INTEGERS)
# Steps that one program of `decode` processes.
_STEPS = 4


@triton.jit
def _decode_kernel(
    data, table, out, row_bytes, steps, width,
    KIND: tl.constexpr, BLOCK_BYTES: tl.constexpr, STEPS: tl.constexpr, BYTES: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = data + index.to(tl.int64) * row_bytes + tl.arange(0, 1)
    place = out + index.to(tl.int64) * width + tl.arange(0, BYTES)[None, :]
    item = out.dtype.element_ty
    for step in range(tl.program_id(1) * MANY, tl.minimum(tl.program_id(1) * MANY + MANY, steps)):
        low, high, low_start, high_start = step_of(
            row, table, step // STEPS, step % STEPS, KIND, BLOCK_BYTES, STEPS, BYTES
        )
        tl.store(place + low_start, low.to(item))
        tl.store(place + high_start, high.to(item))


@triton.jit(do_not_specialize=["rows", "places", "each"])
def _matmul_kernel(
    x, order, experts, data, table, out, x_row, row_bytes, rows, columns, steps, places, each,
    KIND: tl.constexpr, BLOCK_BYTES: tl.constexpr, STEPS: tl.constexpr, BYTES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPED: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """TOGETHER: steps of a turn of the loop, whose loads do not wait for one another"""
    target, row, real, some, origin = tile_of(order, experts, rows, columns, ROWS, GROUPED)
    if not some:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Lanes past the last column read the last column again, and are not stored.
    weight = data + (tl.minimum(column, columns - 1) + origin) * row_bytes
    left = x + row[:, None] * x_row + tl.arange(0, BYTES)[None, :]
    item = x.dtype.element_ty
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    first, end, out = part_of(out, places, columns, steps, each)
    for step in range(first, end, TOGETHER):
        for further in tl.static_range(TOGETHER):
            index = (step + further) // STEPS
            # Known to the compiler, if a turn has whole blocks.
            part = (step + further) % STEPS if TOGETHER % STEPS else further % STEPS
            low, high, low_start, high_start = step_of(
                weight, table, index, part, KIND, BLOCK_BYTES, STEPS, BYTES
            )
            low_x = tl.load(left + low_start, mask=real[:, None], other=0.0)
            high_x = tl.load(left + high_start, mask=real[:, None], other=0.0)
            acc = tl.dot(low_x, tl.trans(low.to(item)), acc, input_precision="ieee")
            acc = tl.dot(high_x, tl.trans(high.to(item)), acc, input_precision="ieee")
    place = out + target[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None] & (column < columns)[None, :])


def decode(data: torch.Tensor, kind: BlockType, dtype: torch.dtype) -> torch.Tensor:
    """`blocks.decode` for the types of `blocks.FUSED`."""
    _require_aligned(data, kind)
    rows, row_bytes = data.shape
    blocks = row_bytes // kind.nbytes
    size, steps = SHAPES[kind.name]
    out = torch.empty((rows, blocks * kind.elements), dtype=dtype, device=data.device)
    grid = (rows, cdiv(blocks * steps, _STEPS))
    # Without fusion, so that numbers equal those of the reference bit for bit.
    _decode_kernel[grid](
        data, _table(data, kind), out, row_bytes, blocks * steps, out.shape[1],
        KIND=kind.name, BLOCK_BYTES=kind.nbytes, STEPS=steps, BYTES=size,
        MANY=_STEPS,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def matmul(x: torch.Tensor, data: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Multiply x [rows, in] by transposed blocks [out, bytes] of a type in `blocks.FUSED`."""
    return _product(x, data, kind, None)


def grouped(x: torch.Tensor, weight: BlockWeight, tiles: Tiles) -> torch.Tensor:
    """`experts.grouped.product` for the types of `blocks.FUSED`."""
    return _product(x, weight.data, weight.kind, tiles)


def _product(
    x: torch.Tensor, data: torch.Tensor, kind: BlockType, tiles: Tiles | None
) -> torch.Tensor:
    _require_aligned(data, kind)
    row_bytes, (size, of_block) = data.shape[1], SHAPES[kind.name]
    tile, count, columns, groups = launched(x, data.shape[0], tiles)
    steps = row_bytes // kind.nbytes * of_block
    together = steps_together(tile, steps)
    parts = divided(x, tiles, tile * count, columns, steps)
    _matmul_kernel[parts.grid(count)](
        x, *groups, data, _table(data, kind), parts.sums, x.stride(0), row_bytes, x.shape[0],
        columns, steps, parts.sums.shape[-2], parts.steps, GROUPED=tiles is not None,
        KIND=kind.name, BLOCK_BYTES=kind.nbytes, STEPS=of_block, BYTES=size,
        ROWS=tile, COLUMNS=parts.columns, TOGETHER=together,
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return parts.result(x.dtype)


def _table(data: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Return the table of a block type on the device of its blocks; these for types without one."""
    return grid(kind.name, data.device) if kind.name in WITH_TABLES else data


def _require_aligned(data: torch.Tensor, kind: BlockType) -> None:
    """Raise ValueError for blocks whose numbers begin at odd addresses."""
    bytes_apart = 4 if kind.name in _BEGIN_AT_FOURS else 2
    require(f"blocks of {kind.name}", data.data_ptr() % bytes_apart == 0, data=data)
