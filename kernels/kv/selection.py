"""Selects the chunks of a retrieval cache, and the moves that they require."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation


def choose_chunks(
    scores: torch.Tensor, chunk_of: torch.Tensor, chunks: int, newest: int
) -> torch.Tensor:
    """Assign each row's slots to the chunks with the greatest scores; chunks that stay keep their
    slot.

    scores: [..., >= chunks] float32; of equal scores the earlier chunk wins, and NaN counts as
        -inf. The first chunk and the `newest` last ones are always selected
    chunk_of: [..., slots] int64, the chunk in each slot, -1 if it is empty; changed in place. Only
        the first min(slots, chunks) slots of a row are used

    Returns [..., slots] int64: the chunk to copy to a slot, -1 where nothing changes. Nothing here
    waits for the device. Raises ValueError.
    """
    require(
        "choose_chunks",
        scores.shape[:-1] == chunk_of.shape[:-1]
        and 0 < chunks <= scores.shape[-1]
        and 0 <= newest < chunk_of.shape[-1]
        and (scores.dtype, chunk_of.dtype) == (torch.float32, torch.int64)
        and scores.device == chunk_of.device
        and scores.stride(-1) == 1
        and chunk_of.is_contiguous(),
        scores=scores,
        chunk_of=chunk_of,
        chunks=chunks,
        newest=newest,
    )
    return implementation("choose_chunks", scores.device)(scores, chunk_of, chunks, newest)


def reference_choose(
    scores: torch.Tensor, chunk_of: torch.Tensor, chunks: int, newest: int
) -> torch.Tensor:
    slots = chunk_of.shape[-1]
    filled = min(slots, chunks)
    worth = scores[..., :chunks].clone()
    worth.masked_fill_(worth.isnan(), float("-inf"))
    worth[..., 0] = float("inf")
    worth[..., max(0, chunks - newest) :] = float("inf")
    least = worth.topk(filled, -1).values[..., -1:]
    wanted, tied = worth > least, worth == least
    wanted |= tied & (tied.cumsum(-1) <= filled - wanted.sum(-1, keepdim=True))
    # Empty slots point past the last chunk, at a column that is never selected.
    known = chunk_of.where(chunk_of >= 0, chunks)
    padded = F.pad(wanted, (0, 1))
    free = ~padded.gather(-1, known)
    free[..., filled:] = False
    enters = wanted & ~torch.zeros_like(padded).scatter_(-1, known, True)[..., :-1]
    # As many slots are free as chunks enter, so the two lists match one to one.
    order = enters.to(torch.int8).argsort(stable=True, dim=-1, descending=True)[..., :filled]
    rank = (free.cumsum(-1) - 1).clamp_(min=0)
    moves = order.gather(-1, rank.clamp_(max=filled - 1)).where(free, -1)
    chunk_of.copy_(moves.where(free, chunk_of))
    return moves
