"""The gated delta rule (Gated DeltaNet; Yang et al., 2025) over rows that may be a tree.

The state S [key_dim, value_dim] of a head becomes, with each row,

    S' = a S + k u^T,   u = b (v - a S^T k),   out = S'^T q

where `a` is the row's decay and `b` its rate. Of several rows, all `u` come from one triangular
system, so S is read once and is not written. Rows that were computed before but are not in S yet
are given by their keys and their `u`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from triforce_kernels.threads import threads_for

# As in transformers and flash-linear-attention.
_EPS = 1e-6


class DeltaRows(NamedTuple):
    """What the rows of a forward bring to a layer.

    queries, keys: [rows, key_heads, key_dim]
    values: [rows, value_heads, value_dim]
    decays: logarithms of the decays, [rows, value_heads] float32
    rates: [rows, value_heads] float32
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor

    def split(self, sizes: Sequence[int]) -> list[DeltaRows]:
        """Return the rows in parts of these sizes."""
        parts = (each.split(sizes) for each in self)
        return [DeltaRows(*part) for part in zip(*parts, strict=True)]

    def normed(self) -> DeltaRows:
        """Return the rows with heads first, in float32: queries and keys [key_heads, rows,
        key_dim] of length 1, queries scaled, values [value_heads, rows, value_dim], decays and
        rates [value_heads, rows].
        """
        queries, keys, values = (each.transpose(0, 1).float().contiguous() for each in self[:3])
        keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + _EPS)
        queries = queries * torch.rsqrt(queries.square().sum(-1, keepdim=True) + _EPS)
        queries *= queries.shape[-1] ** -0.5
        return DeltaRows(queries, keys, values, self.decays.T, self.rates.T)


class Folded(NamedTuple):
    """What rows leave behind, from which they are folded into the state.

    keys: [key_heads, rows, key_dim] float32, of length 1
    updates: `u` of each row, [value_heads, rows, value_dim] float32
    decays: logarithms of the decays, [value_heads, rows] float32
    """

    keys: torch.Tensor
    updates: torch.Tensor
    decays: torch.Tensor

    def part(self, first: int, end: int) -> Folded:
        """Return rows `first` to `end`."""
        return Folded(*(each[:, first:end] for each in self))


def delta_rule(
    rows: DeltaRows,
    state: torch.Tensor,
    past: Folded,
    seen: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Folded]:
    """Return the output of rows [value_heads, rows, value_dim] float32, and what they leave behind.

    rows: as `DeltaRows.normed` returns them
    state: [value_heads, key_dim, value_dim] float32; value heads of a key head are side by side
    past: rows that came before and are not in the state
    seen: which past rows there are, [past] bool; None for all
    visible: which rows each row follows, itself included, [rows, rows] bool; None if each row
        follows the one before it
    """
    with threads_for(2 * rows.keys.shape[1] * state.numel(), state.device):
        return reference_rule(rows, state, past, seen, visible)


def fold(state: torch.Tensor, rows: Folded) -> None:
    """Fold rows, each of which follows the one before it, into a state in place.

    state: [value_heads, key_dim, value_dim] float32
    """
    with threads_for(rows.keys.shape[1] * state.numel(), state.device):
        reference_fold(state, rows)


def delta_chunks(rows: DeltaRows, state: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the output of whole chunks of rows, [value_heads, rows, value_dim] float32, and fold
    them into the state, one chunk after the other.

    rows: as `DeltaRows.normed` returns them; a multiple of `chunk` rows
    state: [value_heads, key_dim, value_dim] float32
    """
    with threads_for(chunk * state.numel(), state.device):
        return reference_chunks(rows, state, chunk)


def reference_rule(
    rows: DeltaRows,
    state: torch.Tensor,
    past: Folded,
    seen: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Folded]:
    """The same, in PyTorch."""
    count, group = rows.keys.shape[1], len(state) // len(rows.keys)
    decays = past.decays if seen is None else past.decays.masked_fill(~seen, 0.0)
    before = decays.cumsum(1)
    start = before[:, -1:] if before.shape[1] else 0.0
    if visible is None:
        own = start + rows.decays.cumsum(1)
        follows = torch.ones(count, count, dtype=torch.bool, device=state.device).tril()
    else:
        own = start + rows.decays @ visible.T.float()
        follows = visible
    mask = follows
    if before.shape[1]:
        old = follows.new_ones(1, before.shape[1]) if seen is None else seen[None]
        mask = torch.cat((old.expand(count, -1), follows), 1)
    decayed = own.unsqueeze(2) - torch.cat((before, own), 1).unsqueeze(1)
    decayed = decayed.masked_fill_(~mask, float("-inf")).exp_()
    both = torch.cat((rows.keys, rows.queries), 1)
    products = both @ torch.cat((past.keys, rows.keys), 1).transpose(1, 2)
    read = both.unsqueeze(1) @ state.unflatten(0, (-1, group))
    read = read.flatten(0, 1) * own.repeat(1, 2).exp_().unsqueeze(2)
    # How much of each earlier row's update a row sees, by its key and by its query.
    products = products.repeat_interleave(group, 0)
    by_key, by_query = products[:, :count] * decayed, products[:, count:] * decayed
    behind = before.shape[1]
    targets = rows.values - read[:, :count]
    if behind:
        targets -= by_key[:, :, :behind] @ past.updates
    targets *= rows.rates.unsqueeze(2)
    updates = targets
    if count > 1:
        system = by_key[:, :, behind:] * rows.rates.unsqueeze(2)
        updates = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    out = read[:, count:] + by_query @ torch.cat((past.updates, updates), 1)
    return out, Folded(rows.keys, updates, rows.decays)


def reference_fold(state: torch.Tensor, rows: Folded) -> None:
    """The same, in PyTorch."""
    total = rows.decays.cumsum(1)
    left = (total[:, -1:] - total).exp_()
    keys = rows.keys.repeat_interleave(len(state) // len(rows.keys), 0)
    state.mul_(total[:, -1, None, None].exp())
    state.baddbmm_((keys * left.unsqueeze(2)).transpose(1, 2), rows.updates)


def reference_chunks(rows: DeltaRows, state: torch.Tensor, chunk: int) -> torch.Tensor:
    """The same, in PyTorch."""
    group = len(state) // len(rows.keys)
    queries, keys, values = (each.unflatten(1, (-1, chunk)) for each in rows[:3])
    rates = rows.rates.unflatten(1, (-1, chunk)).unsqueeze(3)
    total = rows.decays.unflatten(1, (-1, chunk)).cumsum(2)
    follows = torch.ones(chunk, chunk, dtype=torch.bool, device=state.device).tril_()
    decayed = total.unsqueeze(3) - total.unsqueeze(2)
    decayed = decayed.masked_fill_(~follows, float("-inf")).exp_()
    by_key = (keys @ keys.transpose(2, 3)).repeat_interleave(group, 0).mul_(decayed)
    by_query = decayed.mul_((queries @ keys.transpose(2, 3)).repeat_interleave(group, 0))
    keys, queries = (each.repeat_interleave(group, 0) for each in (keys, queries))
    grown = total.exp().unsqueeze(3)
    system = by_key.mul_(rates)
    # The updates without a state before the chunk, and how they depend on one.
    alone = torch.linalg.solve_triangular(system, values * rates, upper=False, unitriangular=True)
    depends = torch.linalg.solve_triangular(
        system, keys * (rates * grown), upper=False, unitriangular=True
    )
    queries = queries * grown
    keys = keys.mul_((total[:, :, -1:] - total).exp_().unsqueeze(3)).transpose(2, 3)
    whole = total[:, :, -1].exp()
    out = torch.empty_like(values)
    for index in range(values.shape[1]):
        updates = torch.baddbmm(alone[:, index], depends[:, index], state, alpha=-1)
        torch.bmm(queries[:, index], state, out=out[:, index])
        out[:, index].baddbmm_(by_query[:, index], updates)
        state.mul_(whole[:, index, None, None]).baddbmm_(keys[:, index], updates)
    return out.flatten(1, 2)
