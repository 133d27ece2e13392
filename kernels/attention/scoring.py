"""Scores of chunks of keys, computed during attention. A retrieval cache selects chunks by them.

A chunk is a run of consecutive keys; the last one may be shorter. While a query attends, each chunk
gets the log-sum-exp of its scores (`streaming`, into a `ScoreBuffer`). When the query's log-sum-exp
over all keys is known, this gives the exact share of its attention,

    mass = exp(log-sum-exp of the chunk - log-sum-exp of all),

which `group_scores` averages over queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from triforce_kernels.attention.attention import finite
from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation

# A chunk is scored in parts of at most this many keys, those of a kernel's smallest tile: a larger
# chunk is several adjacent parts.
LARGEST = 16


@dataclass(frozen=True)
class ScoreBuffer:
    """Destination of the log-sum-exps of chunks.

    out: [kv_heads, rows, chunks] float32
    first: index of the chunk that begins with the next piece's first key
    size: number of keys in a chunk, a power of two, at most LARGEST
    """

    out: torch.Tensor
    first: int
    size: int

    def at(self, chunk: int) -> ScoreBuffer:
        return replace(self, first=chunk)

    def fits(self, kv_heads: int, rows: int, blocks: int, tokens: int) -> bool:
        """Return whether the buffer has room for `blocks` pieces of `tokens` keys each."""
        chunks = -(-tokens // self.size)
        return (
            self.out.shape[:2] == (kv_heads, rows)
            and self.out.dtype == torch.float32
            and self.out.stride(-1) == 1
            and 0 < self.size <= LARGEST
            and self.size & (self.size - 1) == 0
            and (blocks == 1 or tokens % self.size == 0)
            and 0 <= self.first <= self.out.shape[2] - blocks * chunks
        )


def group_scores(
    scores: torch.Tensor,
    lse: torch.Tensor,
    keys: int,
    size: int,
    chunk: int,
    tokens: int,
    out: torch.Tensor,
) -> None:
    """Average the mass of each chunk over groups of consecutive queries and over the heads that
    share a KV head.

    scores: [kv_heads, rows, pieces] float32, log-sum-exps of `size` of the `keys` keys each; rows
        are heads x tokens, and pieces past the last key are ignored
    lse: [kv_heads, rows] float32, over all keys
    chunk: number of keys of a chunk, a multiple of `size`; the last chunk may be shorter
    out: [groups, kv_heads, chunks], groups <= tokens; token t is in group t * groups // tokens

    Raises ValueError.
    """
    kv_heads, rows, pieces = scores.shape
    groups = out.shape[0]
    require(
        "group_scores",
        keys > 0
        and chunk % size == 0
        and out.shape[1:] == (kv_heads, -(-keys // chunk))
        and 0 < groups <= tokens
        and rows % tokens == 0
        and -(-keys // size) <= pieces
        and scores.dtype == torch.float32
        and scores.device == out.device
        and scores.stride(2) == out.stride(2) == 1
        and lse.shape == (kv_heads, rows)
        and lse.is_contiguous(),
        scores=scores,
        lse=lse,
        keys=keys,
        size=size,
        chunk=chunk,
        tokens=tokens,
        out=out,
    )
    implementation("group_scores", scores.device)(scores, lse, keys, size, chunk, tokens, out)


def reference_masses(weights: torch.Tensor, peak: torch.Tensor, buffer: ScoreBuffer) -> None:
    """Compute log-sum-exps of chunks from exp(scores - peak): weights [kv_heads, rows, tokens],
    peak [kv_heads, rows, 1]. A chunk whose weights are too small for float32 gets -inf.
    """
    values = _pieces(weights, buffer.size).sum(-1).log_().add_(peak)
    buffer.out[:, :, buffer.first : buffer.first + values.shape[-1]] = values


def reference_group_scores(
    scores: torch.Tensor,
    lse: torch.Tensor,
    keys: int,
    size: int,
    chunk: int,
    tokens: int,
    out: torch.Tensor,
) -> None:
    groups = out.shape[0]
    values = (scores[..., : -(-keys // size)] - finite(lse).unsqueeze(-1)).exp_()
    if chunk > size:
        values = _pieces(values, chunk // size).sum(-1)
    # Averages over a group's tokens and over heads, as one product.
    group = torch.arange(tokens, device=values.device) * groups // tokens
    members = group == torch.arange(groups, device=values.device).unsqueeze(1)
    shares = members.float().repeat(1, values.shape[1] // tokens)
    shares /= shares.sum(1, keepdim=True)
    out.copy_((shares @ values).transpose(0, 1))


def _pieces(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return [..., n] as [..., pieces, size], padded with zeros."""
    if rest := -x.shape[-1] % size:
        x = F.pad(x, (0, rest))
    return x.unflatten(-1, (-1, size))
