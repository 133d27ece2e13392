"""`layer` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv, next_power_of_2
from triforce_kernels.kv.rounding_triton import whole_of

_COLUMNS = 1024


@triton.jit(do_not_specialize=["heads"])
def _norm_kernel(
    x, delta, weight, out, eps, heads, x_row, x_head, d_row, d_head, w_head,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    place = x + row * x_row + head * x_head + column
    item = x.dtype.element_ty
    value = tl.load(place, mask=inside, other=0.0)
    if ADD:
        change = tl.load(delta + row * d_row + head * d_head + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + change.to(tl.float32)).to(item)
        tl.store(place, value, mask=inside)
    exact = value.to(tl.float32)
    if CENTRED:
        exact = tl.where(inside, exact - tl.sum(exact, 0) / WIDTH, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(exact * exact, 0) / WIDTH + eps)
    factor = tl.load(weight + head * w_head + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET is None:
        scaled = (exact * scale).to(item).to(tl.float32) * factor
    else:
        scaled = exact * scale * (OFFSET + factor)
    tl.store(out + (row * heads + head) * WIDTH + column, scaled.to(item), mask=inside)


@triton.jit
def _put(target, first, second, scale, inside, HALF: tl.constexpr, WHOLE: tl.constexpr):
    """Store both halves of a head, unchanged or as integer multiples of the scales at `scale`."""
    if WHOLE:
        scale_1 = tl.load(scale, mask=inside, other=1.0)
        scale_2 = tl.load(scale + HALF, mask=inside, other=1.0)
        tl.store(target, whole_of(first, scale_1), mask=inside)
        tl.store(target + HALF, whole_of(second, scale_2), mask=inside)
    else:
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)


@triton.jit(do_not_specialize=["tokens", "start", "queries"])
def _rope_kernel(
    heads, cos, sin, query, key, value, start, scale, h_token, h_head, c_token, s_token,
    k_head, k_token, v_head, v_token, tokens, queries, kv_heads,
    HALF: tl.constexpr, COLUMNS: tl.constexpr, ON_DEVICE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < HALF
    source = heads + token * h_token + head * h_head + column
    first = tl.load(source, mask=inside)
    second = tl.load(source + HALF, mask=inside)
    place = token + (tl.load(start) if ON_DEVICE else start)
    # Scales of the keys' heads, then of the values' heads.
    of = scale + (head - queries) * (2 * HALF) + column
    if head >= queries + kv_heads:
        target = value + (head - queries - kv_heads) * v_head + place * v_token + column
        _put(target, first, second, of, inside, HALF, WHOLE)
    else:
        c = cos + token * c_token + column
        s = sin + token * s_token + column
        cos_1 = tl.load(c, mask=inside, other=0.0).to(tl.float32)
        cos_2 = tl.load(c + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_1 = tl.load(s, mask=inside, other=0.0).to(tl.float32)
        sin_2 = tl.load(s + HALF, mask=inside, other=0.0).to(tl.float32)
        one, two = first.to(tl.float32), second.to(tl.float32)
        item = query.dtype.element_ty
        turned_1 = (one * cos_1 - two * sin_1).to(item)
        turned_2 = (two * cos_2 + one * sin_2).to(item)
        if head < queries:
            turned = query + (head * tokens + token) * (2 * HALF) + column
            if WHOLE:
                keys = scale + head // (queries // kv_heads) * (2 * HALF) + column
                scale_1 = tl.load(keys, mask=inside, other=0.0)
                scale_2 = tl.load(keys + HALF, mask=inside, other=0.0)
                turned_1 = (turned_1.to(tl.float32) * scale_1).to(item)
                turned_2 = (turned_2.to(tl.float32) * scale_2).to(item)
            tl.store(turned, turned_1, mask=inside)
            tl.store(turned + HALF, turned_2, mask=inside)
        else:
            target = key + (head - queries) * k_head + place * k_token + column
            _put(target, turned_1, turned_2, of, inside, HALF, WHOLE)


@triton.jit
def _gated_kernel(gate_up, out, row_stride, width, COLUMNS: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    item = out.dtype.element_ty
    if GELU:
        # (1 + tanh(z)) / 2 is the logistic function of 2 z; here z = .798 (gate + .0447 gate ** 3).
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = (gate / (1.0 + tl.exp(-twice))).to(item).to(tl.float32) * up
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(item), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None,
    offset: float | None,
) -> torch.Tensor:
    return _norm(x, weight, eps, delta, offset=offset, centred=False)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None
) -> torch.Tensor:
    return _norm(x, weight, eps, delta, offset=0.0, centred=True)


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None,
    *,
    offset: float | None,
    centred: bool,
) -> torch.Tensor:
    rows, width = x.shape[0], x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other = x if delta is None else delta
    columns = next_power_of_2(width)
    _norm_kernel[(rows, heads)](
        x, other, weight, out, eps, heads,
        x.stride(0), x.stride(-2), other.stride(0), other.stride(-2),
        width if weight.dim() == 2 else 0,
        WIDTH=width, COLUMNS=columns, ADD=delta is not None, OFFSET=offset,
        CENTRED=centred,
        num_warps=min(16, max(1, columns // 256)), enable_fp_fusion=True,
    )  # fmt: skip
    return out


def rope_into(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int | torch.Tensor,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    tokens, count, head_dim = heads.shape
    kv_heads = key.shape[0]
    queries = count - kv_heads * (1 if value is key else 2)
    query = torch.empty((queries, tokens, head_dim), dtype=heads.dtype, device=heads.device)
    _rope_kernel[(tokens, count)](
        heads, cos, sin, query, key, value, start, cos if scale is None else scale,
        *heads.stride()[:2], cos.stride(0), sin.stride(0), *key.stride()[:2], *value.stride()[:2],
        tokens, queries, kv_heads,
        HALF=head_dim // 2, COLUMNS=next_power_of_2(head_dim // 2),
        ON_DEVICE=isinstance(start, torch.Tensor), WHOLE=scale is not None,
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return query


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return _gated(gate_up, gelu=False)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    return _gated(gate_up, gelu=True)


def _gated(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _gated_kernel[(rows, cdiv(width, _COLUMNS))](
        gate_up, out, gate_up.stride(0), width, COLUMNS=_COLUMNS, GELU=gelu,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out
