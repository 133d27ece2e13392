"""Scores of chunks, collected while a pass attends to them: what retrieval is chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from triforce_kernels.attention import Partial, merge_weights
from triforce_kernels.scoring import chunk_mass, chunk_mean

from .device import DeviceMemory, put
from .shape import KVShape
from .sizes import SCORE_GROUPS, scores_bytes

_DTYPE = torch.bfloat16  # of SCORE_ITEMSIZE bytes


class Score(Enum):
    """MASS: the exact share of attention a chunk got. MEAN: query times its mean key."""

    MASS = "mass"
    MEAN = "mean"


class ChunkScores:
    """For each layer, KV head and chunk, the score that the queries of passes gave it.

    A pass's queries are a token that is certain and a draft of which only the first part may hold,
    which is known when the pass is over. So scores are kept apart for a few groups of consecutive
    tokens, and `take` averages those groups that held. Query heads that share a KV head are
    averaged.

    enabled: whether passes collect scores; the model's attention asks.
    """

    def __init__(
        self,
        shape: KVShape,
        chunk_tokens: int,
        context_tokens: int,
        score: Score,
        memory: DeviceMemory,
    ) -> None:
        """Raises DoesNotFitError."""
        self.enabled = True
        self._chunk = chunk_tokens
        self._score = score
        self._memory = memory
        self._allocation = memory.allocate(
            scores_bytes(shape, chunk_tokens, context_tokens), "retrieval scores"
        )
        chunks = -(-context_tokens // chunk_tokens)
        sums = shape.layers * shape.kv_heads * chunks * 4
        self._sums = self._allocation.bytes[:sums].view(torch.float32)
        self._sums = self._sums.view(shape.layers, shape.kv_heads, chunks).zero_()
        self._last = self._allocation.bytes[sums:].view(_DTYPE)
        self._last = self._last.view(SCORE_GROUPS, shape.layers, shape.kv_heads, chunks)
        self._grouped: tuple[torch.Tensor, torch.Tensor] | None = None
        self._parts: list[torch.Tensor] = []
        self._tokens = 0

    def add(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        partial: Partial,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Scores one piece of a layer's keys, whose partial attention is at hand.

        query: [kv_heads, rows, head_dim], rows of all heads of a group; the pieces of a layer come
        in token order, each but the last a whole number of chunks.
        """
        if self._score is Score.MASS:
            self._parts.append(chunk_mass(query, key, partial.lse, self._chunk, mask=mask))
        else:
            self._parts.append(chunk_mean(query, key, self._chunk))

    def end_layer(self, layer: int, partials: Sequence[Partial], tokens: int) -> None:
        """Ends a layer of a pass of `tokens` query tokens."""
        parts, self._parts = self._parts, []
        if self._score is Score.MASS:
            weights = merge_weights(partials).unsqueeze(-1)
            parts = [part.mul_(weight) for part, weight in zip(parts, weights, strict=True)]
        scores = torch.cat(parts, -1)
        kv_heads, rows, chunks = scores.shape
        each = scores.view(kv_heads, rows // tokens, tokens, chunks).mean(1).transpose(0, 1)
        group, sizes = self._groups(tokens, each.device)
        sums = each.new_zeros(min(tokens, SCORE_GROUPS), kv_heads, chunks).index_add_(
            0, group, each
        )
        self._last[: sums.shape[0], layer, :, :chunks] = sums / sizes
        self._tokens = tokens

    def take(self, tokens: int, chunks: int) -> torch.Tensor:
        """Scores of the first `chunks` chunks by the last pass's first `tokens` tokens, as far as
        whole groups tell: [layers, kv_heads, chunks] float32. To be called once a pass.

        Mass is added up over passes, and fades: what mattered lately matters more often than what
        mattered to the last few tokens alone.
        """
        group = _group_of(self._tokens)
        held = int(group[tokens]) if tokens < self._tokens else int(group[-1]) + 1
        latest = self._last[: max(1, held), :, :, :chunks].mean(0, dtype=torch.float32)
        if self._score is Score.MEAN:
            return latest
        sums = self._sums[..., :chunks]
        return sums.mul_(_MEMORY).add_(latest)

    def _groups(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The group of each token of a pass and the sizes of all groups, on the device."""
        if self._grouped is None or self._grouped[0].shape[0] != tokens:
            group = _group_of(tokens)
            sizes = put(group.bincount(), device).view(-1, 1, 1)
            self._grouped = put(group, device), sizes
        return self._grouped

    def close(self) -> None:
        self._memory.free(self._allocation)
        del self._sums, self._last


_MEMORY = 0.9
"""What a pass's mass counts for when the next one has been added."""


def _group_of(tokens: int) -> torch.Tensor:
    """The group of each token of a pass: one each while they suffice."""
    return torch.arange(tokens) * min(tokens, SCORE_GROUPS) // tokens
