"""Drafts that branch: how their tokens follow one another, and which path of them holds."""

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
    """How drafted tokens follow one another. Row 0 of a pass is the text's last token, and row
    i + 1 is token i.

    parents: the row that each token follows, an earlier one. Tokens of one parent are its children,
        no two of them alike, and are tried in their order
    drawn: tokens that were drawn, in the order of their distributions. Each is the first child of
        its parent; all others were sure to be proposed, whatever the verifier draws

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
        """Rows that follow each row."""
        children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for token, parent in enumerate(self.parents):
            children[parent].append(token + 1)
        return tuple(map(tuple, children))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many tokens lie between each row and the text, itself included."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def of_batch(self) -> tuple[int, ...]:
        """Parents of a pass's rows, as `Feed.tree` has them."""
        return (-1, *self.parents)

    def path(self, row: int) -> list[int]:
        """Rows from the text's last token to a row."""
        rows = [row]
        while rows[-1]:
            rows.append(self.parents[rows[-1] - 1])
        return rows[::-1]

    def examined(self, path: Sequence[int]) -> list[tuple[int, bool]]:
        """Rows that were tried along a path that holds, and whether they held."""
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
    """Speculative sampling of trees (SpecInfer, Miao et al., 2024; Sequoia, Chen et al., 2024): the
    row of the last token that holds, 0 for none, and the token that follows it.

    tokens: [drafts, n] int64, of drafts that branch alike
    draft_probs: [drafts, len(branches.drawn), vocab] float32; None where nothing was drawn
    target_probs: [drafts, n + 1, vocab] float32, after each row
    coins: [drafts, n + 1] float64 in [0, 1): one for each token, the last for the one that follows

    Children of a row are tried in their order, against what is left of the verifier's distribution
    p there. One that was drawn from q holds with probability min(1, p[x] / q[x]), and leaves
    norm(max(p - q, 0)) if it does not. One that was sure to be proposed holds with probability
    p[x], and leaves p without x. So whatever q is, what comes after a row has distribution p.
    Returns [drafts] int64 each; the token is -1 where the verifier's distribution is not a number.
    """
    walk = Walk(branches, tokens.device)
    x = tokens[:, walk.child]
    value = target_probs.gather(2, x).double()
    # In parts, since each is widened whole.
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
        # It was held against q.
        value[:, rows, 0] = 0
    value = value.masked_fill(~walk.exists, 0)
    left = mass.unsqueeze(2) - (value.cumsum(2) - value)
    # What has no probability never holds, however little rounding left of the whole.
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
    """The token that follows rows `end` [drafts], none of whose children hold."""
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
    # Rounding may let all of a distribution be rejected once in millions; it is right then.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, probs)
    return sampling.pick(rest, coins)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return max(p - q, 0), not normalised; p where that is zero, up to rounding."""
    rest = (p - q).clamp_(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


class Walk:
    """Branches as a device follows them.

    child: tokens that follow each row, [rows, most children] int64; exists: whether there are such
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
        """The last row of the path that holds, [drafts]: of each row the first child that does.

        holds: whether each child does, [drafts, rows, most children]
        """
        chosen = holds.int().argmax(2, keepdim=True)
        after = self.child.expand_as(holds).gather(2, chosen).squeeze(2) + 1
        after = torch.where(holds.any(2), after, 0)
        end = torch.zeros_like(after[:, 0])
        for _ in range(self._deepest):
            step = after.gather(1, end.unsqueeze(1)).squeeze(1)
            end = torch.where(step > 0, step, end)
        return end
