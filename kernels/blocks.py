"""Matrices in GGUF's block types, decoded to plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import limits
from .block_types import BlockType


@dataclass(frozen=True)
class BlockWeight:
    """A matrix [rows, columns], row by row in blocks.

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

    @property
    def rows_at_once(self) -> int:
        return max(1, limits.DECODED_AT_ONCE // self.columns)


class NoDecoderError(RuntimeError):
    """Nothing installed here decodes a block type."""


def can_decode(kind: BlockType) -> bool:
    """Whether something here decodes it."""
    return kind.name in _OWN or _library() is not None


def decode(data: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Rows [n, bytes] uint8 to the numbers that they stand for, [n, columns] float32.

    Raises NoDecoderError.
    """
    own, library = _OWN.get(kind.name), _library()
    if own is not None:
        numbers = own(data.reshape(-1, kind.nbytes))
    elif library is not None:
        numbers = library(data.reshape(-1), kind.number)
    else:
        raise NoDecoderError(f"{kind.name} weights need transformers 5.23 or newer")
    return numbers.reshape(data.shape[0], -1)


def _library() -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    try:
        from transformers.integrations.gguf.dequant import dequantize
    except ImportError:
        return None
    return dequantize


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The half-precision number at a byte of each block, [blocks, 1] float32."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _fives(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Numbers of 5 bits: 32 high bits at a byte of each block, 16 bytes of low halves behind."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, start : start + 4, None] >> bits & 1).flatten(1)
    low = blocks[:, start + 4 : start + 20]
    return (torch.cat((low & 15, low >> 4), 1) | high << 4).float()


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_fives(blocks, 2) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _fives(blocks, 4) + _half(blocks, 2)


# What transformers' decoders leave out.
_OWN = {"Q5_0": _q5_0, "Q5_1": _q5_1}
