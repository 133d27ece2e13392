"""The geometry of a KV cache. Sizes need no tensors, so a plan can be made without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.formats import ALIGNMENT, ElementType

if TYPE_CHECKING:
    import torch

    KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KVShape:
    """The geometry of a model's KV cache. A block is [2, kv_heads, block_tokens, head_dim].

    dtype: a torch.dtype where there are tensors; sizes alone need its `itemsize`
    text_tokens: of the longest text; a block that is longer never fills
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: ElementType
    text_tokens: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's buffer: rounded up, so that neighbours in an arena stay aligned."""
        return -(-self.token_bytes * self.block_tokens // ALIGNMENT) * ALIGNMENT

    def tail_tokens(self, max_pass_tokens: int) -> int:
        """Tokens of a layer's hot tail: a block that fills, and room for a whole pass."""
        filling = self.block_tokens
        if self.text_tokens is not None:
            filling = min(filling, self.text_tokens)
        return filling + max_pass_tokens

    def tail_bytes(self, max_pass_tokens: int) -> int:
        """Bytes of the hot tail of all layers."""
        return self.token_bytes * self.tail_tokens(max_pass_tokens) * self.layers

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """A flat uint8 block as [2, kv_heads, block_tokens, head_dim]."""
        exact = buffer[: self.token_bytes * self.block_tokens].view(self.dtype)
        return exact.view(2, self.kv_heads, self.block_tokens, self.head_dim)

    def keys_values(self, buffer: torch.Tensor) -> KeysValues:
        """A flat uint8 block as keys and values, [kv_heads, block_tokens, head_dim] each."""
        keys, values = self.view(buffer)
        return keys, values
