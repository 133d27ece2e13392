"""Blocks with the scales and the high 4 bits of GGUF's blocks of 5 and 6 bits per number: where
bits are, and what they stand for.

A number of such a block is an integer of 5 bits (Q5_K) or 6 (Q6_K). Its high bits h stand for the
middle of the integers that have them: 2 h + 1/2, and 4 h + 3/2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def decode(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the numbers of blocks of high bits, [n, bytes] uint8: [n, numbers of a block] float32.

    kind: name of the type that was split
    """
    scales, high = LAYOUTS[kind].of_high(blocks)
    return _MEANING[kind](scales.contiguous(), high.flatten(1))


def _half(scales: torch.Tensor, start: int) -> torch.Tensor:
    return scales[:, start : start + 2].view(torch.float16).float()


def _q6_k(scales: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """A scale for each 16 numbers, and one for all."""
    each = scales[:, :16].view(torch.int8) * _half(scales, 16)
    return each.repeat_interleave(16, 1) * (4 * high.float() - 30.5)


def _q5_k(scales: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """A scale and a minimum of 6 bits for each 32 numbers, and one of each for all."""
    first, second, third = scales[:, 4:16].split(4, 1)
    each = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1) * _half(scales, 0)
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1) * _half(scales, 2)
    each, least = (part.repeat_interleave(32, 1) for part in (each, least))
    return each * (2 * high.float() + 0.5) - least


_MEANING = {"Q6_K": _q6_k, "Q5_K": _q5_k}


@dataclass(frozen=True)
class Layout:
    """Where the 256 integers of a block are: [n, bits, many, 32] in the order of their columns.

    bits: number of low bits. A byte has those of `many` integers, 8 / bits, 32 columns apart
    pairs: whether the two integers of 4 bits that share a byte follow one another among `many`;
        else the first is of the first half of these, and the second of the second half
    scales_last: whether scales follow the integers
    """

    bits: int
    pairs: bool
    scales_last: bool

    def fours(self, integers: torch.Tensor) -> torch.Tensor:
        """Return bytes of two integers of 4 bits each, [n, 128]."""
        first, second = integers.unflatten(2, self._two).unbind(self._which)
        return (first | second << 4).flatten(1)

    def of_fours(self, packed: torch.Tensor) -> torch.Tensor:
        """Undo `fours`."""
        both = packed.view(len(packed), self.bits, 4 // self.bits, 32)
        return torch.stack((both & 15, both >> 4), self._which).flatten(2, 3)

    def together(self, small: torch.Tensor) -> torch.Tensor:
        """Return bytes of `many` integers of `bits` bits each, [n, bytes]."""
        return (small << self._shifts(small)).sum(2, dtype=torch.uint8).flatten(1)

    def apart(self, packed: torch.Tensor) -> torch.Tensor:
        """Undo `together`."""
        some = packed.view(len(packed), self.bits, 1, 32)
        return some >> self._shifts(packed) & (1 << self.bits) - 1

    def in_order(self, scales: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """Return blocks of high bits, [n, bytes]. rest: those of `fours`"""
        return torch.cat((rest, scales) if self.scales_last else (scales, rest), 1)

    def of_high(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of blocks of high bits, and the integers."""
        if self.scales_last:
            return blocks[:, 128:], self.of_fours(blocks[:, :128])
        return blocks[:, :-128], self.of_fours(blocks[:, -128:])

    def unpacked(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of blocks as they are stored, and the integers."""
        if self.scales_last:
            four, upper, scales = blocks.split((128, 64, blocks.shape[1] - 192), 1)
        else:
            scales, upper, four = blocks.split((16, 32, 128), 1)
        return scales, self.of_fours(four.contiguous()) | self.apart(upper.contiguous()) << 4

    def packed(self, scales: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
        """Undo `unpacked`."""
        four, upper = self.fours(integers & 15), self.together(integers >> 4)
        parts = (four, upper, scales) if self.scales_last else (scales, upper, four)
        return torch.cat(parts, 1)

    @property
    def _two(self) -> tuple[int, int]:
        return (-1, 2) if self.pairs else (2, -1)

    @property
    def _which(self) -> int:
        return 3 if self.pairs else 2

    def _shifts(self, like: torch.Tensor) -> torch.Tensor:
        many = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=like.device)
        return many.unsqueeze(1)


LAYOUTS = {
    "Q6_K": Layout(2, pairs=False, scales_last=True),
    "Q5_K": Layout(1, pairs=True, scales_last=False),
}
