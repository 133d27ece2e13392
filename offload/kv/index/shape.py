"""The geometry of an index of keys. Sizes need no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triforce_offload.kv.recent.marks import Mark, MarkTensor
from triforce_offload.weights.formats import ElementType, aligned

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class IndexShape:
    """The geometry of what a sequence keeps for the layers whose tokens choose their keys: a vector
    of each token, and one of each whole block of tokens.

    kind: name of the store in messages
    dim: length of a vector
    block: tokens of a block
    dtype: a torch.dtype where there are tensors; sizes only need its `itemsize`
    text_tokens: number of tokens of the longest sequence
    """

    layers: int
    dim: int
    block: int
    dtype: ElementType
    text_tokens: int
    kind: ClassVar[str] = "index"

    def capacity(self, max_pass_tokens: int) -> int:
        """Vectors of tokens that a layer has room for: of a text, and of the rows of a forward."""
        return self.text_tokens + max_pass_tokens

    def device_bytes(self, max_pass_tokens: int) -> int:
        count = self.capacity(max_pass_tokens) + self.text_tokens // self.block
        return aligned(self.layers * count * self.dim * self.dtype.itemsize)

    def whole(self, key_heads: int, value_heads: int) -> IndexShape:
        """Return the shape over all ranks, each of which has all of it."""
        return self

    def mark_tensors(self, held: int) -> dict[str, MarkTensor]:
        """Return the tensors of a mark of `held` tokens: the text's only mark is at its end."""
        return {"index": MarkTensor((self.layers, 1, held, self.dim), self.dtype)}

    def held_at(self, length: int, tensors: Mapping[str, Sequence[int]]) -> int | None:
        """Return how many tokens a saved mark at a length holds, None if it cannot be so many."""
        (held,) = tensors["index"][2:3] or (0,)
        return held if held == length else None

    def by_heads(self, mark: Mark) -> dict[str, torch.Tensor]:
        """Return the tensors of a mark with its only head in the second dimension."""
        return {"index": mark.parts[0].unsqueeze(1)}

    def mark_of(self, length: int, tensors: Mapping[str, torch.Tensor]) -> Mark:
        """Return the mark of what `by_heads` returned."""
        return Mark(length, 0, (tensors["index"].squeeze(1),))

    def mark_bytes_at(self, length: int) -> int:
        """Bytes of the mark at a length."""
        return self.layers * length * self.dim * self.dtype.itemsize

    @property
    def marks_bytes(self) -> int:
        """Bytes of all marks in host memory: a text can be cut without any."""
        return 0
