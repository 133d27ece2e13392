"""Recurrences by the processor's compiled kernels, row after row."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from triforce_kernels.host.layer import of_length_one
from triforce_kernels.host.library import library
from triforce_kernels.host.structures import Rule
from triforce_kernels.recurrent.delta import EPS, DeltaRows, LeftRows, reference_rule


def rule(
    rows: DeltaRows,
    state: torch.Tensor,
    left: LeftRows,
    first: int | torch.Tensor,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """`delta.delta_rule`."""
    if isinstance(first, torch.Tensor):
        return reference_rule(rows, state, left, first, visible)
    normed, end = _normed(rows), first + len(rows.keys)
    left.keys[:, first:end] = normed.keys
    left.decays[:, first:end] = normed.decays
    into = left.updates[:, first:end]
    return _computed(normed, state, left.part(0, first), into, visible).to(rows.values.dtype)


def chunks(rows: DeltaRows, state: torch.Tensor, chunk: int) -> torch.Tensor:
    """`delta.delta_chunks`; the size of a chunk does not matter."""
    normed = _normed(rows)
    into = torch.empty_like(normed.values)
    return _computed(normed, state, None, into, None, advances=True).to(rows.values.dtype)


def fold(state: torch.Tensor, parts: Sequence[LeftRows]) -> None:
    """`delta.fold`."""
    for part in parts:
        call = _call(state, len(part.keys))
        _add_past(call, part)
        call.advances = True
        _run(call)


def _normed(rows: DeltaRows) -> DeltaRows:
    """`DeltaRows.normed`, of which each part is contiguous."""
    own = 2 if rows.corrects else 0
    heads = [each.transpose(0, 1).float().contiguous() for each in rows.tensors[own:]]
    if rows.corrects:
        scale = rows.queries.shape[-1] ** -0.5
        queries = of_length_one(_with_rows(rows.queries), EPS, scale)
        heads = [queries, of_length_one(_with_rows(rows.keys), EPS), *heads]
    return DeltaRows(*heads, rows.corrects)


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _computed(
    normed: DeltaRows,
    state: torch.Tensor,
    past: LeftRows | None,
    updates: torch.Tensor,
    visible: torch.Tensor | None,
    *,
    advances: bool = False,
) -> torch.Tensor:
    """Return the output of rows, [rows, value_heads, value_dim] float32, and write their updates.

    normed: the rows, see `_normed`
    """
    call = _call(state, len(normed.keys))
    if past is not None:
        _add_past(call, past)
    out = torch.empty(normed.values.shape, dtype=torch.float32, device="cpu")
    call.queries, call.keys, call.values, call.decays, call.rates = (
        each.data_ptr() for each in normed.tensors
    )
    call.corrects = normed.corrects
    if visible is not None:
        visible = visible.contiguous()
        call.visible = visible.data_ptr()
    call.rows, call.out, call.advances = out.shape[1], out.data_ptr(), advances
    call.updates, call.updates_head = updates.data_ptr(), updates.stride(0)
    _run(call)
    return out.transpose(0, 1).contiguous()


def _call(state: torch.Tensor, key_heads: int) -> Rule:
    """Return a call without rows."""
    call = Rule()
    call.heads, call.key_dim, call.value_dim = state.shape
    call.state, call.group = state.data_ptr(), len(state) // key_heads
    return call


def _add_past(call: Rule, past: LeftRows) -> None:
    call.past = past.keys.shape[1]
    call.past_keys, call.past_updates, call.past_decays = (each.data_ptr() for each in past)
    call.past_keys_head, call.past_updates_head, call.past_decays_head = (
        each.stride(0) for each in past
    )


def _run(call: Rule) -> None:
    if not library().triforce_delta(ctypes.byref(call), torch.get_num_threads()):
        raise MemoryError("no memory for the states of a recurrent layer")
