"""Attention of each row to keys that it chooses: blocks of neighbouring tokens with the greatest
scores, and the tokens behind the last whole block (QSA, Qwen4).

Everything is PyTorch's operations. Of equal scores, those of earlier blocks count as greater, so a
row chooses the same blocks beside any others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from triforce_kernels.counts import cdiv
from triforce_kernels.limits import SELECTION_BYTES, selection_bytes

# PyTorch's kernels of a GPU copy a mask unless the stride of its rows is a multiple of this.
_ALIGNED = 16


@dataclass(frozen=True)
class Selection:
    """How the rows of a layer choose.

    budget: number of tokens of the chosen blocks
    block: tokens of a block
    grouped: returns the rotated vectors of blocks, [blocks, dim], of the means of their tokens'
        vectors [blocks, dim] and the blocks' numbers [blocks] int64
    """

    budget: int
    block: int
    grouped: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @property
    def all_seen(self) -> int:
        """Most tokens of which a row sees all."""
        return self.budget + self.block - 1

    def blocks_of(self, vectors: torch.Tensor, first: int) -> torch.Tensor:
        """Return the vectors of blocks, [blocks, dim].

        vectors: of the blocks' tokens, [blocks * block, dim]
        first: number of the first block
        """
        means = vectors.unflatten(0, (-1, self.block)).float().mean(1).to(vectors.dtype)
        numbers = torch.arange(first, first + len(means), device=vectors.device)
        return self.grouped(means, numbers)

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks that rows choose by their scores [rows, blocks], the greatest first,
        and which of them count, since those of blocks that a row does not see are -inf: [rows,
        chosen] each.
        """
        ordered, blocks = scores.sort(dim=1, descending=True, stable=True)
        count = self.budget // self.block
        return blocks[:, :count], ordered[:, :count] > float("-inf")

    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """Return which blocks rows choose by their scores [rows, blocks], of which those of blocks
        that a row does not see are -inf: [rows, blocks] bool.
        """
        count = self.budget // self.block
        if scores.shape[1] <= count:
            return scores > float("-inf")
        least = scores.topk(count, 1).values[:, -1:]
        above, equal = scores > least, scores == least
        room = count - above.sum(1, keepdim=True)
        return (above | (equal & (equal.cumsum(1) <= room))) & (scores > float("-inf"))


def block_scores(queries: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the score of each block for each row, [rows, blocks] float32.

    queries: [rows, heads, dim]
    blocks: [blocks, dim], or [rows, blocks, dim] if rows differ
    """
    products = queries.float() @ blocks.float().mT
    return products.relu_().sum(1).div_(math.sqrt(queries.shape[2]))


def attend_selected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    """Return the attention of rows to some keys of their own, [heads, rows, head_dim].

    query: [heads, rows, head_dim]
    key, value: [kv_heads, tokens, head_dim]
    slots: places of each row's keys, [rows, keys] int64
    seen: which of these count, [rows, keys] bool
    """
    heads, rows, head_dim = query.shape
    kv_heads = key.shape[0]
    # [rows, kv_heads, group, head_dim] and [rows, kv_heads, keys, head_dim]
    own = query.view(kv_heads, -1, rows, head_dim).permute(2, 0, 1, 3)
    keys, values = (each[:, slots].transpose(0, 1) for each in (key, value))
    mask = seen[:, None, None]
    out = F.scaled_dot_product_attention(own, keys, values, attn_mask=mask)
    return out.permute(1, 2, 0, 3).reshape(heads, rows, head_dim)


class Newest(NamedTuple):
    """The tokens behind the whole blocks of a text that the rows of a pass see, in all layers.

    whole: number of whole blocks of the text
    in_blocks: places of the tokens of further blocks, [rows, blocks * block]
    unseen: which of these blocks a row does not see, [rows, blocks] bool
    last: places of the tokens behind these, and which of them count, [rows, block - 1] each
    """

    whole: int
    in_blocks: torch.Tensor
    unseen: torch.Tensor
    last: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, block: int, length: int, lineage: torch.Tensor) -> Newest:
        """block: tokens of a block. length: number of tokens of the text

        lineage: the last rows that each row follows, its own last, [rows, count] int64; -1 stands
            for the text's last token, -2 for the one before that
        """
        count, device = lineage.shape[1], lineage.device
        whole, rest = divmod(length, block)
        own = lineage >= 0
        depth = own.sum(1)
        places = torch.where(own, lineage + length, -1)
        order = torch.arange(count + rest, device=device)
        # Token i of a row is one of the rest of the text, or one of the last `depth` rows.
        of_rows = (count - depth).unsqueeze(1) + order - rest
        behind = places.gather(1, of_rows.clamp(0, count - 1))
        tokens = torch.where(order < rest, whole * block + order, behind)
        seen = (rest + depth).unsqueeze(1)
        later = (count + rest) // block
        ends = torch.arange(1, later + 1, device=device) * block
        last = (seen // block * block) + torch.arange(block - 1, device=device)
        last_places = tokens.gather(1, last.clamp(max=count + rest - 1)).clamp_(0)
        in_blocks = tokens[:, : later * block].clamp(0)
        return cls(whole, in_blocks, ends > seen, (last_places, last < seen))


def slots_of_rows(
    selection: Selection,
    queries: torch.Tensor,
    blocks: torch.Tensor,
    vectors: torch.Tensor,
    newest: Newest,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of the keys that the rows of a pass choose, and which of them count:
    [rows, keys] each.

    queries: of the index, [rows, heads, dim]
    blocks: vectors of the whole blocks of the text, [blocks, dim]
    vectors: of single tokens, those of the rows behind the text's, [length + rows, dim]
    """
    block, device, whole = selection.block, vectors.device, newest.whole
    rows, later = newest.unseen.shape
    scores = block_scores(queries, blocks)
    if later:
        given = vectors[newest.in_blocks.flatten()].unflatten(0, (rows * later, block))
        means = given.float().mean(1).to(vectors.dtype)
        numbers = torch.arange(whole, whole + later, device=device).repeat(rows)
        theirs = selection.grouped(means, numbers).unflatten(0, (rows, later))
        more = block_scores(queries, theirs).masked_fill_(newest.unseen, float("-inf"))
        scores = torch.cat((scores, more), 1)
    best, counted = selection.best(scores)
    places = (best.unsqueeze(2) * block + torch.arange(block, device=device)).flatten(1)
    if later:
        first = whole * block
        behind = newest.in_blocks.gather(1, (places - first).clamp(0, later * block - 1))
        places = torch.where(places < first, places, behind)
    last, seen = newest.last
    slots = torch.cat((places, last), 1)
    return slots, torch.cat((counted.repeat_interleave(block, 1), seen), 1)


def attend_text_selected(
    selection: Selection,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: torch.Tensor,
    blocks: torch.Tensor,
) -> torch.Tensor:
    """Return the attention of the last rows of a text, [heads, rows, head_dim], some at a time.

    query: [heads, rows, head_dim]
    key, value: [kv_heads, tokens, head_dim], of which the last `rows` are the rows' own
    queries: of the index, [rows, heads, dim]
    blocks: vectors of the whole blocks of the text, the rows included, [blocks, dim]
    """
    heads, rows, _ = query.shape
    kv_heads, tokens, _ = key.shape
    device, block = query.device, selection.block
    out, before = torch.empty_like(query), tokens - rows
    places = torch.arange(tokens, device=device)
    each = selection_bytes(tokens, len(blocks), queries.shape[1], query.element_size())
    step = max(1, SELECTION_BYTES // each)
    wide = cdiv(tokens, _ALIGNED) * _ALIGNED
    for first in range(0, rows, step):
        end = min(first + step, rows)
        last = (before + torch.arange(first, end, device=device)).unsqueeze(1)
        scores = block_scores(queries[first:end], blocks)
        ends = torch.arange(1, len(blocks) + 1, device=device) * block
        scores.masked_fill_(ends > last + 1, float("-inf"))
        chosen = selection.chosen(scores)
        # The block that a row does not see the end of is its last one.
        newest = ((last + 1) // block).clamp(max=len(blocks))
        chosen = F.pad(chosen, (0, 1)).scatter_(1, newest, True)
        seen = chosen.gather(1, (places // block).expand(end - first, -1)) & (places <= last)
        added = query.new_full((end - first, wide), float("-inf"))[:, :tokens].masked_fill_(seen, 0)
        for head in range(kv_heads):
            group = slice(head * (heads // kv_heads), (head + 1) * (heads // kv_heads))
            own = query[group, first:end]
            keys, values = (each[head].expand(1, len(own), -1, -1) for each in (key, value))
            # With four dimensions, since no kernel that computes attention by parts takes three.
            out[group, first:end] = F.scaled_dot_product_attention(
                own[None], keys, values, attn_mask=added[None, None]
            )[0]
        # The next rows need the memory.
        del scores, chosen, seen, added
    return out
