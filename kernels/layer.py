"""The small operations of a layer, each in one launch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from triforce_kernels.checks import alike, require
from triforce_kernels.dispatch import implementation
from triforce_kernels.kv.rounding import rounded

# Of `clamped_swiglu`.
_CLAMP, _SHARPNESS = 7.0, 1.702


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
    *,
    offset: float | None = None,
) -> torch.Tensor:
    """Compute the root mean square norm over the last dimension, after adding `delta` to x in
    place, if given.

    x: [rows, width] or [rows, heads, width], with a contiguous last dimension
    weight: [width], or [heads, width] for a weight of each head, contiguous
    delta: shape of x
    offset: the factors are offset + weight, and the product with them is in float32 (Gemma: 1,
        Gemma 4: 0); None for weights as they are, and a product in x's dtype

    Returns x's shape (Zhang and Sennrich, 2019). Rounds where transformers does: before the product
    with the weight and after it, or with an offset only after it. Raises ValueError.
    """
    require(
        "rms_norm",
        x.dim() in (2, 3)
        and weight.shape in (x.shape[-1:], x.shape[1:])
        and weight.is_contiguous()
        and alike(x, weight, delta)
        and (delta is None or delta.shape == x.shape),
        x=x,
        weight=weight,
        delta=delta,
    )
    return implementation("rms_norm", x.device)(x, weight, eps, delta, offset)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the layer norm without a bias over the last dimension (Ba et al., 2016), after adding
    `delta` to x in place, if given. Shapes are those of `rms_norm`.

    Rounds only after the product with the weight, as transformers' Cohere does. Raises ValueError.
    """
    require(
        "layer_norm",
        x.dim() in (2, 3)
        and weight.shape == x.shape[-1:]
        and alike(x, weight, delta)
        and (delta is None or delta.shape == x.shape),
        x=x,
        weight=weight,
        delta=delta,
    )
    return implementation("layer_norm", x.device)(x, weight, eps, delta)


def rope_into(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int | torch.Tensor,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values to a cache.

    heads: [tokens, query_heads + 2 kv_heads, head_dim]: queries, then keys, then values; without
        values if the keys are the values too
    cos, sin: [tokens, head_dim]; a head's first half is paired with its second half
    key, value: [kv_heads, capacity, head_dim], written at start, start + 1, ...; the same tensor if
        the keys are the values too (latent attention)
    start: a number, or [1] int64 on the device; the caller makes sure that there is room
    scale: [2, kv_heads, head_dim] float32, if key and value are int8 multiples of it (`rounding`),
        or [1, ...] for the same tensor; queries are then multiplied by the scale of the keys

    Returns the queries, [query_heads, tokens, head_dim]. Raises ValueError, before any write.
    """
    tokens, count, head_dim = heads.shape
    kv_heads, capacity, _ = key.shape
    sides = 1 if value is key else 2
    require(
        "rope_into",
        key.shape == value.shape == (kv_heads, capacity, head_dim)
        and count > sides * kv_heads
        and cos.shape == sin.shape == (tokens, head_dim)
        and head_dim % 2 == 0
        and alike(heads, cos, sin)
        and alike(heads if scale is None else key, key, value)
        and (
            scale is None
            or (
                (scale.shape, scale.dtype) == ((sides, kv_heads, head_dim), torch.float32)
                and scale.is_contiguous()
                and key.dtype == torch.int8
                and heads.device == key.device == scale.device
            )
        )
        and (
            (start.shape, start.dtype, start.device) == ((1,), torch.int64, heads.device)
            if isinstance(start, torch.Tensor)
            else 0 <= start <= capacity - tokens
        ),
        heads=heads,
        cos=cos,
        sin=sin,
        key=key,
        value=value,
        start=start,
        scale=scale,
    )
    return implementation("rope_into", heads.device)(heads, cos, sin, key, value, start, scale)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of [rows, 2 width], gate first: [rows, width] (Shazeer, 2020).

    Raises ValueError.
    """
    require(
        "swiglu",
        gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and alike(gate_up),
        gate_up=gate_up,
    )
    return implementation("swiglu", gate_up.device)(gate_up)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up of [rows, 2 width], gate first: [rows, width] (Shazeer, 2020).

    gelu is approximated with tanh, and rounded before the product. Raises ValueError.
    """
    require(
        "geglu",
        gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and alike(gate_up),
        gate_up=gate_up,
    )
    return implementation("geglu", gate_up.device)(gate_up)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gate * sigmoid(1.702 gate) * (up + 1) of [rows, 2 width], gate first: [rows, width].
    Gates are at most 7, and up projections within -7 and 7 (gpt-oss). Raises ValueError.
    """
    require(
        "clamped_swiglu",
        gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and alike(gate_up),
        gate_up=gate_up,
    )
    return implementation("clamped_swiglu", gate_up.device)(gate_up)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x: [heads, tokens, head_dim], with its first half paired with its second half."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


def reference_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None,
    offset: float | None,
) -> torch.Tensor:
    if delta is not None:
        x += delta
    if x.dtype.itemsize > 2:
        return torch.rms_norm(x, x.shape[-1:], None, eps) * (weight + offset if offset else weight)
    exact = x.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True).add_(eps))
    if offset is not None:
        return exact.mul_(scale).mul_(weight.float() + offset).to(x.dtype)
    return (exact * scale).to(x.dtype) * weight


def reference_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None
) -> torch.Tensor:
    if delta is not None:
        x += delta
    return F.layer_norm(x.float(), weight.shape, weight.float(), None, eps).to(x.dtype)


def reference_rope_into(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int | torch.Tensor,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    tokens, kv_heads = heads.shape[0], key.shape[0]
    heads = heads.transpose(0, 1)
    sides = [key] if value is key else [key, value]
    new = list(heads[-kv_heads * len(sides) :].split(kv_heads))
    new[0] = rotate(new[0], cos, sin)
    query = rotate(heads[: -kv_heads * len(sides)], cos, sin)
    if scale is not None:
        per_token = scale.unsqueeze(2)
        new = [rounded(*each) for each in zip(new, per_token, strict=True)]
        group = query.shape[0] // kv_heads
        query = (query * per_token[0].repeat_interleave(group, 0)).to(query.dtype)
    for side, numbers in zip(sides, new, strict=True):
        if isinstance(start, int):
            side[:, start : start + tokens] = numbers
        else:
            side.index_copy_(1, start + torch.arange(tokens, device=heads.device), numbers)
    return query


def reference_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def reference_geglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def reference_clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=_CLAMP)
    return (up.clamp(-_CLAMP, _CLAMP) + 1).mul_(gate).mul_(gate.mul(_SHARPNESS).sigmoid_())
