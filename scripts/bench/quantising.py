"""Matrices in FP8 and in GGUF's blocks, made from dense ones by rounding to the nearest, and split.

llama.cpp chooses scales by searching, so its files are a little nearer to the dense numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from triforce_kernels.weights.block_types import BLOCK_TYPES, F8_E4M3
from triforce_kernels.weights.blocks import decode
from triforce_kernels.weights.high_quants import LAYOUTS
from triforce_kernels.weights.split_blocks import SplitBlocksWeight
from triforce_offload.weights.split_formats import SplitFP8, SplitQuants

_FP8 = "FP8"
# The bits per number of the high bits, by the format of which they are.
HIGH_BITS = {_FP8: 5.25, "Q6_K": 4.5625, "Q5_K": 4.5}


def exact(matrix: torch.Tensor, inputs: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Round a matrix to a format. inputs: not used"""
    return _split(matrix, kind).joined()[:, : matrix.shape[1]]


def by_high_bits(matrix: torch.Tensor, inputs: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Round a matrix to the high bits of a format. inputs: not used"""
    weight = _split(matrix, kind)
    return decode(weight.data, weight.high_type, torch.float32)[:, : matrix.shape[1]]


def _split(matrix: torch.Tensor, kind: str) -> SplitBlocksWeight:
    """Return a matrix in split blocks, with zeros in the columns that fill its last blocks."""
    return _in_fp8(matrix) if kind == _FP8 else _in_quants(matrix, kind)


def _in_fp8(matrix: torch.Tensor) -> SplitBlocksWeight:
    """With a scale for each 128 by 128 numbers, as checkpoints have them."""
    rows, size = matrix.shape[0], F8_E4M3.elements
    padded = F.pad(matrix, (0, -matrix.shape[1] % size, 0, -rows % size))
    tiles = padded.view(padded.shape[0] // size, size, -1, size)
    scales = tiles.abs().amax((1, 3), keepdim=True) / 448
    numbers = (tiles / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    whole = scales.expand(-1, size, -1, 1).contiguous().view(torch.uint8)
    blocks = torch.cat((numbers, whole), 3).view(padded.shape[0], -1)[:rows].contiguous()
    form = SplitFP8(rows, padded.shape[1])
    made = form.view(torch.empty(form.nbytes, dtype=torch.uint8))
    # With room for all low bits, also those of the zeros.
    made = replace(made, low=torch.empty(rows * padded.shape[1], dtype=torch.uint8))
    made.write(blocks)
    return made


def _in_quants(matrix: torch.Tensor, name: str) -> SplitBlocksWeight:
    kind, layout = BLOCK_TYPES[name], LAYOUTS[name]
    padded = F.pad(matrix, (0, -matrix.shape[1] % kind.elements))
    scales, integers = _QUANTISED[name](padded.reshape(-1, kind.elements))
    shape = -1, layout.bits, 8 // layout.bits, 32
    blocks = layout.packed(scales, integers.to(torch.uint8).view(shape))
    form = SplitQuants(len(matrix), padded.shape[1], kind)
    made = form.view(torch.empty(form.nbytes, dtype=torch.uint8))
    made.write(blocks.view(len(matrix), -1))
    return made


def _halves(*numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers [n, 1] in half precision, [n, bytes]."""
    return torch.cat(numbers, 1).half().view(torch.uint8)


def _q6_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of blocks [n, 256], [n, bytes], and the integers, from 0 on."""
    parts = blocks.unflatten(1, (16, 16))
    each = parts.abs().amax(2) / 31
    whole = (each.amax(1, keepdim=True) / 127).half().float()
    each = _rounded(each, whole, 0, 127)
    integers = _rounded(parts, (each * whole).unsqueeze(2), -32, 31) + 32
    return torch.cat((each.to(torch.uint8), _halves(whole)), 1), integers.flatten(1)


def _q5_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_q6_k`."""
    parts = blocks.unflatten(1, (8, 32))
    least = -parts.amin(2).clamp(max=0)
    each = (parts.amax(2) + least) / 31
    wholes = [(part.amax(1, keepdim=True) / 63).half().float() for part in (each, least)]
    six = [_rounded(part, whole, 0, 63) for part, whole in zip((each, least), wholes, strict=True)]
    each, least = (part * whole for part, whole in zip(six, wholes, strict=True))
    integers = _rounded(parts + least.unsqueeze(2), each.unsqueeze(2), 0, 31)
    scales, minima = (part.to(torch.uint8) for part in six)
    early = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    packed = torch.cat((*early, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4), 1)
    return torch.cat((_halves(*wholes), packed), 1), integers.flatten(1)


def _rounded(numbers: torch.Tensor, scale: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Return the nearest integers to numbers / scale; 0 where the scale is."""
    return (numbers / scale.where(scale > 0, torch.inf)).round().clamp(least, most)


_QUANTISED = {"Q6_K": _q6_k, "Q5_K": _q5_k}
