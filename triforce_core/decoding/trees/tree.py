"""Tree drafts: how their tokens follow one another, and which path of them is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from triforce_core.plan.levels import DISTRIBUTION_ROWS
from triforce_kernels.sampling import sampling
from triforce_offload.memory.device import put


@dataclass(frozen=True)
class Branches:
    """How the tokens of a tree follow one another.

    Row 0 of a pass is the last token of the text, and row i + 1 is draft token i.

    parents: for each token, the earlier row that it follows. The children of a row are distinct
        tokens, and are tried in their order
    drawn: indices of the tokens that were drawn at random, in the order of their distributions.
        Each is the first child of its parent. All other tokens were certain to be proposed

    Raises ValueError.
    """

    parents: tuple[int, ...]
    drawn: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for token, parent in enumerate(self.parents):
            if not 0 <= parent <= token:
                raise ValueError(f"row {token + 1} of a draft cannot follow row {parent}")
        for token in self.drawn:
            if self.children[self.parents[token]][0] != token + 1:
                raise ValueError(f"row {token + 1} was drawn, and is not its parent's first child")

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each row, the rows that follow it."""
        children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for token, parent in enumerate(self.parents):
            children[parent].append(token + 1)
        return tuple(map(tuple, children))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each row, the number of draft tokens on its path, itself included."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def of_batch(self) -> tuple[int, ...]:
        """Parents of a pass's rows, in the form that `ForwardBatch.tree` takes."""
        return (-1, *self.parents)

    def path(self, row: int) -> list[int]:
        """Return the rows from the text's last token (row 0) to `row`."""
        rows = [row]
        while rows[-1]:
            rows.append(self.parents[rows[-1] - 1])
        return rows[::-1]

    def examined(self, path: Sequence[int]) -> list[tuple[int, bool]]:
        """Return the rows that were tried along an accepted path, and whether each was accepted."""
        tried = []
        for row, after in zip(path, [*path[1:], None], strict=True):
            for child in self.children[row]:
                tried.append((child, child == after))
                if child == after:
                    break
        return tried


def accept_tree(
    tokens: torch.Tensor,
    branches: Branches,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply speculative sampling to trees (SpecInfer, Miao et al., 2024; Sequoia, Chen et al.,
    2024).

    tokens: [drafts, n] int64, for drafts with equal branches
    draft_probs: [drafts, len(branches.drawn), vocab] float32; None if no token was drawn
    target_probs: [drafts, n + 1, vocab] float32, the distribution after each row
    coins: [drafts, n + 1] float64 in [0, 1): one for each token, and the last for the next token

    The children of a row are tried in their order, against the rest of the verifier's distribution
    p at that row. A child x that was drawn from q is accepted with probability min(1, p[x] / q[x]);
    a rejection leaves norm(max(p - q, 0)). A child that was certain to be proposed is accepted with
    probability p[x]; a rejection leaves p without x. So for any q, the token after a row has
    distribution p.

    Returns the row of the last accepted token (0 for none) and the token that follows it, both
    [drafts] int64. The token is -1 if the verifier's distribution contains NaN.
    """
    walk = Walk(branches, tokens.device)
    x = tokens[:, walk.child]
    value = target_probs.gather(2, x).double()
    # In parts, because a float64 sum widens all of its input.
    parts = target_probs.split(DISTRIBUTION_ROWS, 1)
    mass = torch.cat([part.sum(-1, dtype=torch.float64) for part in parts], 1)
    coin = coins[:, walk.child]
    first = None
    if branches.drawn:
        drawn = put(branches.drawn, tokens.device)
        rows = put([branches.parents[token] for token in branches.drawn], tokens.device)
        q = draft_probs.gather(2, tokens[:, drawn].unsqueeze(2)).squeeze(2).double()
        first = coins[:, drawn] * q < value[:, rows, 0]
        for some in torch.arange(len(rows), device=rows.device).split(DISTRIBUTION_ROWS):
            at = rows[some]
            rest = residual(target_probs[:, at], draft_probs[:, some])
            mass[:, at] = rest.sum(-1, dtype=torch.float64)
            value[:, at] = rest.gather(2, x[:, at]).double()
        # The drawn child is tested against q instead.
        value[:, rows, 0] = 0
    value = value.masked_fill(~walk.exists, 0)
    left = mass.unsqueeze(2) - (value.cumsum(2) - value)
    # A token of probability 0 is never accepted, even if rounding leaves almost no mass.
    holds = (coin * left < value) & (value > 0)
    if first is not None:
        holds[:, rows, 0] = first
    end = walk.end(holds)
    return end, _after(end, tokens, branches, walk, draft_probs, target_probs, coins[:, -1])


def _after(
    end: torch.Tensor,
    tokens: torch.Tensor,
    branches: Branches,
    walk: Walk,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
) -> torch.Tensor:
    """Draw the token that follows rows `end` [drafts], none of whose children was accepted."""
    many = torch.arange(end.shape[0], device=end.device)
    probs = target_probs[many, end]
    sure = walk.exists[end]
    if branches.drawn:
        index = {branches.parents[token]: i for i, token in enumerate(branches.drawn)}
        source = [index.get(row, -1) for row in range(len(branches.children))]
        source = put(source, end.device)[end]
        has_drawn = (source >= 0).unsqueeze(1)
        probs = torch.where(has_drawn, residual(probs, draft_probs[many, source]), probs)
        sure = torch.cat((sure[:, :1] & ~has_drawn, sure[:, 1:]), 1)
    tried = torch.zeros_like(probs).scatter_add_(
        1, tokens[many.unsqueeze(1), walk.child[end]], sure.to(probs.dtype)
    )
    rest = probs.masked_fill(tried > 0, 0)
    # Very rarely, rounding rejects all of a distribution; drawing from the whole is right then.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, probs)
    return sampling.pick(rest, coins)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return max(p - q, 0), not normalised; p in rows where that is zero because p = q."""
    rest = (p - q).clamp_(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


class Walk:
    """Branches as tensors on a device.

    child: indices of the tokens that follow each row, [rows, most children] int64, padded with 0
    exists: whether each entry of `child` is a child rather than padding
    """

    def __init__(self, branches: Branches, device: torch.device) -> None:
        children = branches.children
        width = max(1, *map(len, children))
        table = [[*rows, *[0] * (width - len(rows))] for rows in children]
        rows = put([row for rows in table for row in rows], device).view(len(children), width)
        self.exists = rows > 0
        self.child = (rows - 1).clamp_(min=0)
        self._deepest = max(branches.depths)

    def end(self, holds: torch.Tensor) -> torch.Tensor:
        """Return the last row of the accepted path, [drafts]. It takes the first accepted child of
        each row.

        holds: whether each child is accepted, [drafts, rows, most children]
        """
        chosen = holds.int().argmax(2, keepdim=True)
        after = self.child.expand_as(holds).gather(2, chosen).squeeze(2) + 1
        after = torch.where(holds.any(2), after, 0)
        end = torch.zeros_like(after[:, 0])
        for _ in range(self._deepest):
            step = after.gather(1, end.unsqueeze(1)).squeeze(1)
            end = torch.where(step > 0, step, end)
        return end
