"""The gated delta rule (Gated DeltaNet; Yang et al., 2025), and the recurrence of Mamba-2 (Dao and
Gu, 2024), over rows that may be a tree.

The state S [key_dim, value_dim] of a head becomes, with each row,

    S' = a S + k u^T,   out = S'^T q

where `a` is the row's decay. By the delta rule, with the row's rate `b`, u = b (v - a S^T k); k has
length 1, and q length key_dim ** -0.5. In Mamba-2, u = b v, and k and q are as they come. Of
several rows, all `u` of the delta rule come from one triangular system, so S is read once and is
not written. Rows leave their keys, updates `u` and decays behind, in which later rows find them,
until they are folded into S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from triforce_kernels.checks import alike, require
from triforce_kernels.dispatch import implementation
from triforce_kernels.threads import threads_for

# As in transformers and flash-linear-attention.
EPS = 1e-6


class DeltaRows(NamedTuple):
    """What the rows of a forward bring to a layer.

    queries, keys: [rows, key_heads, key_dim], of any length
    values: [rows, value_heads, value_dim]
    decays: logarithms of the decays, [rows, value_heads] float32
    rates: [rows, value_heads] float32
    corrects: whether an update is the rate times what the state lacks of a value, as by the delta
        rule, and not times the value itself, as in Mamba-2
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor
    corrects: bool = True

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values, decays and rates."""
        return self[:5]

    def split(self, sizes: Sequence[int]) -> list[DeltaRows]:
        """Return the rows in parts of these sizes."""
        parts = (each.split(sizes) for each in self.tensors)
        return [DeltaRows(*part, self.corrects) for part in zip(*parts, strict=True)]

    def normed(self) -> DeltaRows:
        """Return the rows with heads first, in float32: queries and keys [key_heads, rows,
        key_dim], by the delta rule normed and scaled, values [value_heads, rows, value_dim], decays
        and rates [value_heads, rows].
        """
        queries, keys, values = (each.transpose(0, 1).float().contiguous() for each in self[:3])
        if self.corrects:
            keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + EPS)
            queries = queries * torch.rsqrt(queries.square().sum(-1, keepdim=True) + EPS)
            queries *= queries.shape[-1] ** -0.5
        return DeltaRows(queries, keys, values, self.decays.T, self.rates.T, self.corrects)


class LeftRows(NamedTuple):
    """What rows left behind, from which they are folded into the state.

    keys: [key_heads, rows, key_dim] float32, as `DeltaRows.normed` has them
    updates: `u` of each row, [value_heads, rows, value_dim] float32
    decays: logarithms of the decays, [value_heads, rows] float32
    """

    keys: torch.Tensor
    updates: torch.Tensor
    decays: torch.Tensor

    def part(self, first: int, end: int) -> LeftRows:
        """Return rows `first` to `end`."""
        return LeftRows(*(each[:, first:end] for each in self))


def delta_rule(
    rows: DeltaRows,
    state: torch.Tensor,
    left: LeftRows,
    first: int | torch.Tensor,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of rows, [rows, value_heads, value_dim] in the dtype of the values,
    contiguous.

    state: [value_heads, key_dim, value_dim] float32, contiguous; value heads of a key head are side
        by side
    left: rows that came before, which are not in the state; has room for these rows too, which are
        left behind from `first` on
    first: number of rows that came before, or [1] int64 on the device
    visible: which rows each row follows, itself included, [rows, rows] bool; None if each row
        follows the one before it

    Raises ValueError for inputs that do not fit.
    """
    count, (value_heads, key_dim, value_dim) = len(rows.keys), state.shape
    key_heads, room = left.keys.shape[:2]
    require(
        "delta_rule",
        alike(rows.queries, rows.keys, rows.values)
        and alike(state, rows.decays, rows.rates, *left)
        and state.dtype == torch.float32
        and state.is_contiguous()
        and rows.queries.shape == rows.keys.shape == (count, key_heads, key_dim)
        and rows.values.shape == (count, value_heads, value_dim)
        and rows.decays.shape == rows.rates.shape == (count, value_heads)
        and left.keys.shape == (key_heads, room, key_dim)
        and left.updates.shape == (value_heads, room, value_dim)
        and left.decays.shape == (value_heads, room)
        and value_heads % key_heads == 0
        and (isinstance(first, torch.Tensor) or 0 <= first <= room - count)
        and (visible is None or visible.shape == (count, count)),
        **rows._asdict(),
        state=state,
        left_keys=left.keys,
        left_updates=left.updates,
        left_decays=left.decays,
        first=first,
        visible=visible,
    )
    with threads_for(2 * count * state.numel(), state.device):
        return implementation("delta_rule", state.device)(rows, state, left, first, visible)


def delta_chunks(rows: DeltaRows, state: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the output of whole chunks of rows, each of which follows the one before it, [rows,
    value_heads, value_dim] in the dtype of the values. Fold them into the state, one chunk after
    the other.

    rows: a multiple of `chunk` rows, or none
    state: as for `delta_rule`
    """
    if not len(rows.values):
        return rows.values
    with threads_for(chunk * state.numel(), state.device):
        return implementation("delta_chunks", state.device)(rows, state, chunk)


def fold(state: torch.Tensor, parts: Sequence[LeftRows]) -> None:
    """Fold parts of rows, one after the other, into a state in place. Each row follows the one
    before it. Whatever fails for lack of memory fails before the state changes.

    state: as for `delta_rule`
    """
    rows = max(part.keys.shape[1] for part in parts)
    with threads_for(rows * state.numel(), state.device):
        implementation("fold_rows", state.device)(state, parts)


def reference_rule(
    rows: DeltaRows,
    state: torch.Tensor,
    left: LeftRows,
    first: int | torch.Tensor,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    normed, count, device = rows.normed(), len(rows.keys), state.device
    if isinstance(first, torch.Tensor):
        places = torch.arange(left.keys.shape[1], device=device)
        seen = (places < first)[None]
        # What lies behind the rows may be anything, also no number.
        past = LeftRows(*(each.masked_fill(~_like(seen, each), 0.0) for each in left))
        decays = past.decays
    else:
        past = left.part(0, first)
        seen, decays = torch.ones(1, first, dtype=torch.bool, device=device), past.decays
    follows = visible
    if follows is None:
        follows = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    # Logarithms of what is left of the state, and of past rows, at each row.
    before = decays.cumsum(1)
    own = normed.decays @ follows.T.float()
    if before.shape[1]:
        own += before[:, -1:]
    decayed = own.unsqueeze(2) - torch.cat((before, own), 1).unsqueeze(1)
    mask = torch.cat((seen.expand(count, -1), follows), 1)
    decayed = decayed.masked_fill_(~mask, float("-inf")).exp_()
    # How much of each row's update a row sees, by its key and by its query.
    both, group = torch.cat((normed.keys, normed.queries), 1), len(state) // len(normed.keys)
    products = both @ torch.cat((past.keys, normed.keys), 1).transpose(1, 2)
    products = products.repeat_interleave(group, 0)
    by_key, by_query = products[:, :count] * decayed, products[:, count:] * decayed
    read = (both.unsqueeze(1) @ state.unflatten(0, (-1, group))).flatten(0, 1)
    read *= own.repeat(1, 2).exp_().unsqueeze(2)
    behind, rates = before.shape[1], normed.rates.unsqueeze(2)
    targets = normed.values
    if rows.corrects:
        targets = targets - read[:, :count]
        if behind:
            targets -= by_key[:, :, :behind] @ past.updates
    updates = targets * rates
    if rows.corrects and count > 1:
        system = by_key[:, :, behind:] * rates
        updates = torch.linalg.solve_triangular(system, updates, upper=False, unitriangular=True)
    out = read[:, count:] + by_query @ torch.cat((past.updates, updates), 1)
    for to, each in zip(left, (normed.keys, updates, normed.decays), strict=True):
        if isinstance(first, torch.Tensor):
            to.index_copy_(1, first + places[:count], each)
        else:
            to[:, first : first + count] = each
    return out.transpose(0, 1).to(rows.values.dtype).contiguous()


def reference_fold(state: torch.Tensor, parts: Sequence[LeftRows]) -> None:
    steps = []
    for part in parts:
        total = part.decays.cumsum(1)
        since = (total[:, -1:] - total).exp_()
        keys = part.keys.repeat_interleave(len(state) // len(part.keys), 0)
        keys = (keys * since.unsqueeze(2)).transpose(1, 2)
        steps.append((total[:, -1, None, None].exp(), keys, part.updates.contiguous()))
    for decay, keys, updates in steps:
        state.mul_(decay).baddbmm_(keys, updates)


def reference_chunks(rows: DeltaRows, state: torch.Tensor, chunk: int) -> torch.Tensor:
    normed, group = rows.normed(), len(state) // rows.keys.shape[1]
    queries, keys, values = (each.unflatten(1, (-1, chunk)) for each in normed[:3])
    rates = normed.rates.unflatten(1, (-1, chunk)).unsqueeze(3)
    total = normed.decays.unflatten(1, (-1, chunk)).cumsum(2)
    follows = torch.ones(chunk, chunk, dtype=torch.bool, device=state.device).tril_()
    decayed = total.unsqueeze(3) - total.unsqueeze(2)
    decayed = decayed.masked_fill_(~follows, float("-inf")).exp_()
    by_key = (keys @ keys.transpose(2, 3)).repeat_interleave(group, 0).mul_(decayed)
    by_query = decayed.mul_((queries @ keys.transpose(2, 3)).repeat_interleave(group, 0))
    keys, queries = (each.repeat_interleave(group, 0) for each in (keys, queries))
    grown = total.exp().unsqueeze(3)
    # The updates without a state before the chunk, and how they depend on one.
    alone, depends = values * rates, None
    if rows.corrects:
        system = by_key.mul_(rates)
        solve = torch.linalg.solve_triangular
        alone = solve(system, alone, upper=False, unitriangular=True)
        depends = solve(system, keys * (rates * grown), upper=False, unitriangular=True)
    queries = queries.mul_(grown)
    keys = keys.mul_((total[:, :, -1:] - total).exp_().unsqueeze(3)).transpose(2, 3)
    whole = total[:, :, -1].exp()
    out = torch.empty_like(values)
    for index in range(values.shape[1]):
        updates = alone[:, index]
        if depends is not None:
            updates = torch.baddbmm(updates, depends[:, index], state, alpha=-1)
        torch.bmm(queries[:, index], state, out=out[:, index])
        out[:, index].baddbmm_(by_query[:, index], updates)
        state.mul_(whole[:, index, None, None]).baddbmm_(keys[:, index], updates)
    return out.flatten(1, 2).transpose(0, 1).to(rows.values.dtype).contiguous()


def _like(seen: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
    """Return [1, rows] as a mask of [heads, rows, ...]."""
    return seen if each.dim() == 2 else seen.unsqueeze(2)
