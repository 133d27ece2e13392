"""The gated delta rule by the processor's compiled kernels, row after row."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from triforce_kernels.host.library import Rule, library
from triforce_kernels.recurrent.delta import DeltaRows, LeftRows, reference_rule


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
    normed, end = rows.normed(), first + len(rows.keys)
    left.keys[:, first:end] = normed.keys
    left.decays[:, first:end] = normed.decays
    into = left.updates[:, first:end]
    return _computed(normed, state, left.part(0, first), into, visible).to(rows.values.dtype)


def chunks(rows: DeltaRows, state: torch.Tensor, chunk: int) -> torch.Tensor:
    """`delta.delta_chunks`; the size of a chunk does not matter."""
    normed = rows.normed()
    into = torch.empty_like(normed.values)
    return _computed(normed, state, None, into, None, advances=True).to(rows.values.dtype)


def fold(state: torch.Tensor, parts: Sequence[LeftRows]) -> None:
    """`delta.fold`."""
    calls = [(call, keep) for part in parts for call, keep in [_call(state, part)]]
    for call, _ in calls:
        call.advances = True
        _run(call)


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

    normed: see `DeltaRows.normed`
    """
    call, kept = _call(state, past)
    out = torch.empty(normed.values.shape, dtype=torch.float32, device="cpu")
    inputs = [
        *(each.contiguous() for each in (*normed[:3], normed.decays.exp(), normed.rates)),
        None if visible is None else visible.contiguous(),
    ]
    call.queries, call.keys, call.values, call.decays, call.rates = (
        each.data_ptr() for each in inputs[:5]
    )
    if visible is not None:
        call.visible = inputs[5].data_ptr()
    call.group = len(state) // len(normed.keys)
    call.rows, call.out, call.advances = out.shape[1], out.data_ptr(), advances
    call.updates, call.updates_head = updates.data_ptr(), updates.stride(0)
    _run(call)
    del kept
    return out.transpose(0, 1).contiguous()


def _call(state: torch.Tensor, past: LeftRows | None) -> tuple[Rule, torch.Tensor | None]:
    """Return a call without rows, and a tensor that must outlive it."""
    call = Rule()
    call.heads, call.key_dim, call.value_dim = state.shape
    call.state, call.group = state.data_ptr(), 1
    if past is None:
        return call, None
    decays = past.decays.exp().contiguous()
    call.group, call.past = len(state) // len(past.keys), past.keys.shape[1]
    call.past_keys, call.past_keys_head = past.keys.data_ptr(), past.keys.stride(0)
    call.past_updates, call.past_updates_head = past.updates.data_ptr(), past.updates.stride(0)
    call.past_decays = decays.data_ptr()
    return call, decays


def _run(call: Rule) -> None:
    if not library().triforce_delta(ctypes.byref(call), torch.get_num_threads()):
        raise MemoryError("no memory for the states of a recurrent layer")
