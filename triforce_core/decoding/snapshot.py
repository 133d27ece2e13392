"""What a context has computed, on the host: its text, its KV, what its chunks were worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Snapshot:
    """tokens: whose KV it has. layers: how many

    layer_kv: of a layer, [2, kv_heads, tokens, head_dim] on the host. scores: mass of each chunk
    so far, [layers, kv_heads, chunks] float32 on the host; None where nothing is retrieved.
    scored_by: how, and how large chunks are. about: what else was kept with it
    """

    tokens: list[int]
    layers: int
    layer_kv: Callable[[int], torch.Tensor]
    scores: torch.Tensor | None = None
    scored_by: str = ""
    about: Mapping[str, str] = field(default_factory=dict)

    def has_scores(self, by: str, chunk_size: int) -> bool:
        """Whether they are of all chunks of so many tokens. by: see scored_by."""
        if self.scores is None or self.scored_by != by:
            return False
        return self.scores.shape[2] == len(self.tokens) // chunk_size
