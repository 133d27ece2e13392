"""The geometry of the KV of layers with a window. Sizes need no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from triforce_offload.kv.recent.marks import MOST_MARKS, Mark, MarkTensor
from triforce_offload.weights.formats import ElementType, aligned

if TYPE_CHECKING:
    import torch

# Tokens that are held before the window of the next one, so that a text can be cut by a few tokens
# without a mark.
SPARE_TOKENS = 32
# Least number of tokens that may be held beyond these, and the same as a share of the window, as a
# divisor: so rows move once in many passes.
ROOM_TOKENS, _ROOM_SHARE = 64, 4
# Rows behind those of a pass: recorded forwards of the retrieval level are padded.
_PADDING = 32


@dataclass(frozen=True)
class WindowShape:
    """The geometry of the KV of a sequence in the layers that have a window.

    kind: name of the store in messages
    window: number of tokens that a token attends to, itself included
    dtype: a torch.dtype where there are tensors; sizes only need its `itemsize`
    text_tokens: number of tokens of the longest sequence
    """

    layers: int
    kv_heads: int
    head_dim: int
    window: int
    dtype: ElementType
    text_tokens: int
    kind: ClassVar[str] = "window"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def past(self) -> int:
        """Number of tokens before a row that the row sees."""
        return self.window - 1

    @property
    def held(self) -> int:
        """Number of tokens that are always held, or all if the text has fewer."""
        return held_tokens(self.window, self.text_tokens)

    @property
    def kept_tokens(self) -> int:
        """Most tokens that are held: when there would be more, all but the last `held` are
        dropped.
        """
        return _kept_tokens(self.window, self.text_tokens)

    def rows_shape(self, tokens: int) -> tuple[int, ...]:
        """Shape of the KV of `tokens` tokens in all layers."""
        return (self.layers, 2, self.kv_heads, tokens, self.head_dim)

    def capacity(self, max_pass_tokens: int) -> int:
        """Tokens that a layer has room for: those held, and the rows of a forward."""
        return window_capacity(self.window, self.text_tokens, max_pass_tokens)

    def device_bytes(self, max_pass_tokens: int) -> int:
        return aligned(self.layers * self.token_bytes * self.capacity(max_pass_tokens))

    def whole(self, key_heads: int, value_heads: int) -> WindowShape:
        """Return the shape with the heads of all ranks."""
        return replace(self, kv_heads=key_heads)

    def mark_tensors(self, held: int) -> dict[str, MarkTensor]:
        """Return the tensors of a mark of `held` tokens, over all heads."""
        return {
            "window": MarkTensor((2 * self.layers, self.kv_heads, held, self.head_dim), self.dtype)
        }

    def held_at(self, length: int, tensors: Mapping[str, Sequence[int]]) -> int | None:
        """Return how many tokens a saved mark at a length holds, by the shapes of its tensors; None
        if it cannot hold that number.
        """
        (held,) = tensors["window"][2:3] or (0,)
        return held if min(length, self.past) <= held <= min(length, self.kept_tokens) else None

    def by_heads(self, mark: Mark) -> dict[str, torch.Tensor]:
        """Return the tensors of a mark with heads in the second dimension."""
        return {"window": mark.parts[0].flatten(0, 1)}

    def mark_of(self, length: int, tensors: Mapping[str, torch.Tensor]) -> Mark:
        """Return the mark of what `by_heads` returned."""
        rows = tensors["window"].contiguous().unflatten(0, (-1, 2))
        return Mark(length, length - rows.shape[3], (rows,))

    @property
    def mark_bytes(self) -> int:
        """Most bytes of a mark."""
        return self.layers * self.token_bytes * self.kept_tokens

    def mark_bytes_at(self, length: int) -> int:
        """Most bytes of a mark at a length."""
        return self.mark_bytes

    @property
    def marks_bytes(self) -> int:
        """Most bytes of all marks, in host memory."""
        return MOST_MARKS * self.mark_bytes


def window_capacity(window: int, text_tokens: int, max_pass_tokens: int) -> int:
    """Return the number of tokens that a layer has room for, see `WindowShape`."""
    return _kept_tokens(window, text_tokens) + max_pass_tokens + _PADDING


def _kept_tokens(window: int, text_tokens: int) -> int:
    room = max(ROOM_TOKENS, window // _ROOM_SHARE)
    return min(held_tokens(window, text_tokens) + room, text_tokens)


def held_tokens(window: int, text_tokens: int) -> int:
    """Return the number of tokens that are always held, see `WindowShape.held`."""
    return min(window - 1 + SPARE_TOKENS, text_tokens)
