"""Scores of chunks, collected while a pass attends to them: what retrieval is chosen by."""

from __future__ import annotations

from enum import Enum

import torch

from triforce_kernels.attention.scoring import LARGEST, ScoreBuffer, group_scores
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.sizes import SCORE_GROUPS, scores_bytes
from triforce_offload.memory.device import DeviceMemory

# What a pass's mass counts for when the next one has been added.
_MEMORY = 0.9
# A score is SCORE_ITEMSIZE bytes.
_DTYPE = torch.bfloat16


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
        self._buffer: ScoreBuffer | None = None
        self._tokens = 0

    def buffer(self, rows: torch.Tensor, keys: int) -> ScoreBuffer:
        """Where attention writes the scores of one layer's chunks; it lives until `end_layer`.

        rows: queries [kv_heads, rows, head_dim]; keys: of all chunks together
        """
        size = min(self._chunk, LARGEST)
        shape = (*rows.shape[:2], -(-keys // size))
        out = torch.empty(shape, dtype=torch.float32, device=rows.device)
        self._buffer = ScoreBuffer(out, 0, size, self._score is Score.MASS)
        return self._buffer

    def end_layer(self, layer: int, lse: torch.Tensor, tokens: int, keys: int) -> None:
        """Ends a layer of a pass of `tokens` query tokens, whose buffer is written.

        lse: [kv_heads, rows], of the scores of all keys
        """
        groups, chunks = min(tokens, SCORE_GROUPS), -(-keys // self._chunk)
        group_scores(
            self._buffer.out,
            lse if self._buffer.mass else None,
            keys,
            self._buffer.size,
            self._chunk,
            tokens,
            self._last[:groups, layer, :, :chunks],
        )
        self._buffer = None
        self._tokens = tokens

    def take(self, tokens: int, chunks: int) -> torch.Tensor:
        """Scores of the first `chunks` chunks by the last pass's first `tokens` tokens, as far as
        whole groups tell: [layers, kv_heads, chunks] float32. To be called once a pass.

        Mass is added up over passes, and fades: what mattered lately matters more often than what
        mattered to the last few tokens alone.
        """
        groups = min(self._tokens, SCORE_GROUPS)
        held = tokens * groups // self._tokens if tokens < self._tokens else groups
        latest = self._last[: max(1, held), :, :, :chunks].mean(0, dtype=torch.float32)
        if self._score is Score.MEAN:
            return latest
        sums = self._sums[..., :chunks]
        return sums.mul_(_MEMORY).add_(latest)

    @property
    def sums(self) -> torch.Tensor:
        """What was added up of mass so far, [layers, kv_heads, chunks] float32; a view."""
        return self._sums

    def roll_back(self, tokens: int) -> None:
        """Forgets what was added up for chunks that are not among the first `tokens` tokens."""
        self._sums[..., tokens // self._chunk :] = 0

    def close(self) -> None:
        self._memory.free(self._allocation)
        del self._sums, self._last
