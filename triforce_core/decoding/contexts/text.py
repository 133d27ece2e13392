"""The tokens of a sequence, and how often each of them occurs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from triforce_offload.memory.device import put


class MayFollow(Protocol):
    """The tokens that a grammar allows after the generated ones: `guiding.Guide`."""

    def take(self, generated: list[int]) -> None: ...

    def masks(
        self, proposed: list[int], tokens: list[int], paths: Sequence[Sequence[int]]
    ) -> torch.Tensor: ...


@dataclass
class Text:
    """Tokens of a sequence, prompt included. Tokens from index `committed` on are only proposed.

    prompt: number of prompt tokens
    seen: counts of the committed tokens, created when a request first penalises tokens
    guide: restricts the tokens that may follow, if given
    """

    tokens: list[int]
    committed: int = field(init=False)
    prompt: int = field(init=False)
    seen: Seen | None = field(init=False, default=None)
    guide: MayFollow | None = None

    def __post_init__(self) -> None:
        self.committed = self.prompt = len(self.tokens)

    def commit(self, tokens: list[int]) -> None:
        """Append accepted tokens."""
        self.tokens += tokens
        self.committed = len(self.tokens)


class Seen:
    """How often each token occurs in the committed part of a text, which only grows.

    everywhere: counts over the whole committed part, [vocab] float32 on the device
    generated: counts over the part after the prompt, likewise
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.everywhere = torch.zeros(vocab, device=device)
        self.generated = torch.zeros(vocab, device=device)
        self._counted = 0

    def take(self, text: Text) -> None:
        """Count the tokens that were committed since the last call."""
        for counts, first in ((self.everywhere, 0), (self.generated, text.prompt)):
            new = text.tokens[max(first, self._counted) : text.committed]
            if new:
                ids = put(new, counts.device)
                counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))
        self._counted = text.committed
