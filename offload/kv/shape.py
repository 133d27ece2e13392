"""The geometry of a KV cache. Sizes need no tensors, so plans are made without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from triforce_kernels.limits import KV_BLOCKS_AT_ONCE, LEAST_EXCEPTIONS, NUMBERS_OF_AN_EXCEPTION
from triforce_offload.weights.formats import ElementType, aligned


@dataclass(frozen=True)
class KVShape:
    """The geometry of a model's KV cache. A block is [sides, kv_heads, block_tokens, head_dim].

    dtype: a torch.dtype where there are tensors; sizes only need its `itemsize`
    text_tokens: length of the longest sequence; a block that is longer never fills
    split: whether blocks are stored in 12 bits per number as in `kernels/kv/split_kv`, and not as
        plain numbers
    sides: 2 for keys and values, 1 if the keys are the values too (latent attention)
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: ElementType
    text_tokens: int | None = None
    split: bool = False
    sides: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return self.sides * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def dense_block_bytes(self) -> int:
        """Bytes of a dense block, rounded up so that neighbours in an arena stay aligned."""
        return aligned(self.token_bytes * self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block as it is stored."""
        return self.parts.nbytes if self.split else self.dense_block_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot for any block: a block that cannot be split is stored dense."""
        return max(self.block_bytes, self.dense_block_bytes)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the buffer in which split blocks are decoded, a few at a time."""
        return self.decoded_at_once * self.dense_block_bytes if self.split else 0

    @property
    def decoded_at_once(self) -> int:
        """Number of split blocks decoded at a time: at most what a sequence has in a layer."""
        if self.text_tokens is None:
            return KV_BLOCKS_AT_ONCE
        return max(1, min(KV_BLOCKS_AT_ONCE, self.text_tokens // self.block_tokens))

    @property
    def bits_per_number(self) -> float:
        """Bits per number of a stored block, everything counted."""
        return 8 * self.block_bytes / self.numbers

    @property
    def numbers(self) -> int:
        """Count of numbers in a block."""
        return self.sides * self.kv_heads * self.block_tokens * self.head_dim

    @cached_property
    def parts(self) -> SplitBlockLayout:
        return SplitBlockLayout.of(self.sides * self.kv_heads, self.block_tokens, self.head_dim)

    def size(self, tokens: int) -> tuple[int, int, int, int]:
        """Return the size of tokens of a layer, [sides, kv_heads, tokens, head_dim]."""
        return self.sides, self.kv_heads, tokens, self.head_dim

    def tail_tokens(self, max_pass_tokens: int) -> int:
        """Tokens of a layer's hot tail: a block that fills, and room for a whole pass."""
        filling = self.block_tokens
        if self.text_tokens is not None:
            filling = min(filling, self.text_tokens)
        return filling + max_pass_tokens

    def tail_bytes(self, max_pass_tokens: int) -> int:
        """Bytes of the hot tail of all layers."""
        return self.token_bytes * self.tail_tokens(max_pass_tokens) * self.layers


@dataclass(frozen=True)
class CopiedShape:
    """The geometry of keys and values of a layer that are copied for the first and the last tokens
    of a text.

    firsts, lasts: number of these tokens
    rows: number of rows of the largest forward that attends to them, which need room behind them
    """

    kv_heads: int
    head_dim: int
    firsts: int
    lasts: int
    rows: int
    dtype: ElementType

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Keys and values, heads, tokens, numbers of a head."""
        return 2, self.kv_heads, self.firsts + self.lasts + self.rows, self.head_dim

    @property
    def nbytes(self) -> int:
        return aligned(prod(self.size) * self.dtype.itemsize)


@dataclass(frozen=True)
class SplitBlockLayout:
    """Where the parts of a split block begin: byte offsets in the block.

    rows: number of heads of keys and of values together
    room: number of exceptions that the block has room for
    """

    rows: int
    tokens: int
    head_dim: int
    room: int
    high: int
    low: int
    base: int
    places: int
    patterns: int
    nbytes: int

    @classmethod
    def of(cls, rows: int, tokens: int, head_dim: int) -> SplitBlockLayout:
        numbers = rows * tokens * head_dim
        room = max(LEAST_EXCEPTIONS, numbers // NUMBERS_OF_AN_EXCEPTION)
        # Parts with larger elements come first, so that each part is aligned to its elements.
        places, patterns = 0, 4 * room
        high = -(-6 * room // 64) * 64
        low = high + numbers
        base = low + numbers // 2
        nbytes = aligned(base + rows * head_dim)
        return cls(rows, tokens, head_dim, room, high, low, base, places, patterns, nbytes)
