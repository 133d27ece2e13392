"""Scores of chunks, collected while a pass attends to them. Retrieval selects chunks by them."""

from __future__ import annotations

import torch

from triforce_kernels.attention.scoring import LARGEST, ScoreBuffer, group_scores
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.sizes import SCORE_GROUPS, scores_bytes
from triforce_offload.memory.device import DeviceMemory

# Factor by which the mass of earlier passes is multiplied when a new pass is added.
_MEMORY = 0.9
# A score has SCORE_ITEMSIZE bytes.
_DTYPE = torch.bfloat16


class ChunkScores:
    """For each layer, KV head and chunk, the exact share of attention that the queries of passes
    gave it.

    A pass's queries are a certain token and a draft, of which only a first part may be accepted.
    That is known only after the pass, so scores are stored separately for a few groups of
    consecutive tokens, and `take` averages the groups that were accepted. Query heads that share a
    KV head are averaged.
    """

    def __init__(
        self,
        shape: KVShape,
        chunk_tokens: int,
        context_tokens: int,
        memory: DeviceMemory,
    ) -> None:
        """Raises DoesNotFitError."""
        self._chunk = chunk_tokens
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
        """Return the buffer for attention to write the scores of one layer's chunks to. It is valid
        until `end_layer`.

        rows: queries [kv_heads, rows, head_dim]
        keys: number of keys of all chunks together
        """
        size = min(self._chunk, LARGEST)
        shape = (*rows.shape[:2], -(-keys // size))
        out = torch.empty(shape, dtype=torch.float32, device=rows.device)
        self._buffer = ScoreBuffer(out, 0, size)
        return self._buffer

    def end_layer(self, layer: int, lse: torch.Tensor, tokens: int, keys: int) -> None:
        """End a layer of a pass of `tokens` query tokens, whose buffer is written.

        lse: [kv_heads, rows], log-sum-exps of the scores of all keys
        """
        # The last rows of a tree may be more than the context takes, and no chunk ends there.
        keys = min(keys, self._chunk * self._last.shape[3])
        groups, chunks = min(tokens, SCORE_GROUPS), -(-keys // self._chunk)
        group_scores(
            self._buffer.out,
            lse,
            keys,
            self._buffer.size,
            self._chunk,
            tokens,
            self._last[:groups, layer, :, :chunks],
        )
        self._buffer = None
        self._tokens = tokens

    def take(self, tokens: int, chunks: int) -> torch.Tensor:
        """Return scores of the first `chunks` chunks by the last pass's first `tokens` tokens,
        rounded down to whole groups but at least one: [layers, kv_heads, chunks] float32. Call it
        once a pass.

        Mass is summed over passes and decays: chunks that mattered to recent passes matter again
        more often than those that mattered only to the last few tokens.
        """
        groups = min(self._tokens, SCORE_GROUPS)
        held = tokens * groups // self._tokens if tokens < self._tokens else groups
        latest = self._last[: max(1, held), :, :, :chunks].mean(0, dtype=torch.float32)
        sums = self._sums[..., :chunks]
        return sums.mul_(_MEMORY).add_(latest)

    @property
    def sums(self) -> torch.Tensor:
        """The mass summed so far, [layers, kv_heads, chunks] float32; a view."""
        return self._sums

    def roll_back(self, tokens: int) -> None:
        """Clear the sums of chunks that are not among the first `tokens` tokens."""
        self._sums[..., tokens // self._chunk :] = 0

    def close(self) -> None:
        self._memory.free(self._allocation)
        del self._sums, self._last
