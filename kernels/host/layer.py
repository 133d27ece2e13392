"""The small operations of a layer by the processor's compiled kernels."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch

from triforce_kernels import elementwise, layer
from triforce_kernels.host.library import library
from triforce_kernels.host.structures import DENSE, Gate, Norm, Rope


class NormKind(IntEnum):
    """As in `source/host.h`."""

    RMS, RMS_FLOAT32, LAYER, UNIT = range(4)


class Operation(IntEnum):
    """As in `source/host.h`."""

    SIGMOID, SILU, TANH, GELU, SOFTPLUS, CLAMPED = range(6)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None,
    offset: float | None,
) -> torch.Tensor:
    """`layer.rms_norm`."""
    if x.dtype not in DENSE:
        return layer.reference_rms_norm(x, weight, eps, delta, offset)
    kind = NormKind.RMS if offset is None else NormKind.RMS_FLOAT32
    return _normed(kind, x, weight, eps, delta, offset or 0.0)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None
) -> torch.Tensor:
    """`layer.layer_norm`."""
    if x.dtype not in DENSE:
        return layer.reference_layer_norm(x, weight, eps, delta)
    return _normed(NormKind.LAYER, x, weight, eps, delta)


def of_length_one(x: torch.Tensor, eps: float, factor: float = 1.0) -> torch.Tensor:
    """Return factor * x / sqrt(sum of squares + eps) of [rows, heads, width], heads first, in
    float32: [heads, rows, width].
    """
    rows, heads, width = x.shape
    out = torch.empty(heads, rows, width, dtype=torch.float32, device="cpu")
    call = _norm(NormKind.UNIT, x, eps, out)
    call.out_row, call.out_head, call.factor = width, rows * width, factor
    library().triforce_norm(ctypes.byref(call), torch.get_num_threads())
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`layer.swiglu`."""
    return _gated(Operation.SILU, gate_up)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`layer.geglu`."""
    return _gated(Operation.GELU, gate_up)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`layer.clamped_swiglu`."""
    return _gated(Operation.CLAMPED, gate_up)


def computed(x: torch.Tensor, operation: str) -> torch.Tensor:
    """`elementwise`: the function of each number."""
    if x.dtype not in DENSE:
        return elementwise.reference(x, operation)
    wide = x.float().contiguous()
    out = torch.empty_like(wide)
    number = Operation[operation.upper()]
    library().triforce_map(number, wide.data_ptr(), out.data_ptr(), wide.numel())
    return out.to(x.dtype)


def rope_into(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int | torch.Tensor,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """`layer.rope_into`."""
    if scale is not None or isinstance(start, torch.Tensor) or heads.dtype not in DENSE:
        return layer.reference_rope_into(heads, cos, sin, key, value, start, scale)
    if heads.stride(2) != 1:
        heads = heads.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    tokens, count, head_dim = heads.shape
    kv_heads = key.shape[0]
    queries = count - kv_heads * (1 if value is key else 2)
    out = heads.new_empty(queries, tokens, head_dim)
    call = Rope()
    call.x, call.cos, call.sin = (each.data_ptr() for each in (heads, cos, sin))
    call.key, call.value, call.out = (each.data_ptr() for each in (key, value, out))
    call.format, call.tokens, call.heads = DENSE[heads.dtype], tokens, count
    call.queries, call.kv_heads = queries, kv_heads
    call.head_dim, call.start = head_dim, start
    call.x_row, call.x_head = heads.stride()[:2]
    call.key_head, call.key_row = key.stride()[:2]
    call.value_head, call.value_row = value.stride()[:2]
    library().triforce_rope(ctypes.byref(call), torch.get_num_threads())
    return out


def _normed(
    kind: NormKind,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None,
    offset: float = 0.0,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    call = _norm(kind, x if x.dim() == 3 else x.unsqueeze(1), eps, out)
    weight = weight.contiguous()
    call.weight, call.offset, call.factor = weight.data_ptr(), offset, 1.0
    call.weight_head = call.width if weight.dim() == 2 else 0
    if delta is not None:
        delta = delta.contiguous()
        call.delta = delta.data_ptr()
    call.out_row, call.out_head = call.heads * call.width, call.width
    library().triforce_norm(ctypes.byref(call), torch.get_num_threads())
    return out


def _norm(kind: NormKind, x: torch.Tensor, eps: float, out: torch.Tensor) -> Norm:
    """Describe a norm of x, [rows, heads, width] with a contiguous last dimension."""
    call = Norm()
    call.kind, call.x, call.out, call.eps = kind, x.data_ptr(), out.data_ptr(), eps
    call.format, call.out_format = DENSE[x.dtype], DENSE[out.dtype]
    call.rows, call.heads, call.width = x.shape
    call.x_row, call.x_head = x.stride()[:2]
    return call


def _gated(operation: Operation, gate_up: torch.Tensor) -> torch.Tensor:
    if gate_up.dtype not in DENSE:
        return _REFERENCES[operation](gate_up)
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    call = Gate()
    call.x, call.out, call.format = gate_up.data_ptr(), out.data_ptr(), DENSE[gate_up.dtype]
    call.operation, call.rows, call.width = operation, rows, width
    call.x_row = gate_up.stride(0)
    library().triforce_gated(ctypes.byref(call), torch.get_num_threads())
    return out


_REFERENCES = {
    Operation.SILU: layer.reference_swiglu,
    Operation.GELU: layer.reference_geglu,
    Operation.CLAMPED: layer.reference_clamped_swiglu,
}
