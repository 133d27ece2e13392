"""Partial attention: attend to one piece of the keys now, merge the pieces later.

Softmax attention over a concatenation of key sets equals the sum of the attentions over each set,
weighted by softmax of their log-sum-exps (Flash-Decoding; Dao et al., 2023). Therefore KV blocks
can stream through a few device slots: each block yields `(out, lse)` and can then be dropped.

Queries of all heads that share a KV head are packed as rows, so a key is read once per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from triforce_kernels.checks import alike, require
from triforce_kernels.elementwise import sigmoid

_HALF = (torch.float16, torch.bfloat16)
_FLASH_CAPABILITY = (8, 0)
_FLASH_HEAD_DIM = 256
_MASK_COLUMNS = 16
_CPU_ROWS = 4
# Replaces -inf in a mask (if greater, the least number of the dtype does): so far below any score
# that its weight is exactly 0, and still finite when scaled for powers of 2.
_LEAST_MASK = -1e30


class Partial(NamedTuple):
    """Attention over a part of the keys.

    out: [kv_heads, rows, head_dim], normalised within the part, dtype of the query; on a GPU the
        rows may come before the heads in memory
    lse: [kv_heads, rows], float32, natural log of the sum of exp(scores) over the part
    """

    out: torch.Tensor
    lse: torch.Tensor


class Softmax(NamedTuple):
    """What a softmax over scores has beyond a plain one.

    sinks: [heads] float32, scores of one more column of each head, which has no value; see
        `with_sinks`. None for none
    cap: a score x becomes cap * tanh(x / cap) first (Gemma 2). None for no cap
    """

    sinks: torch.Tensor | None = None
    cap: float | None = None


PLAIN = Softmax()


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> Partial:
    """Compute attention of packed queries over one piece of keys, scaled by head_dim ** -0.5.

    query: [kv_heads, rows, head_dim]
    key, value: [kv_heads, tokens, head_dim], tokens >= 1, last dimension contiguous
    mask: additive [rows, tokens] of query's dtype, no row entirely -inf; None attends to all
    causal: row r attends to keys 0..r; requires rows == tokens, excludes mask

    No row may have only scores of -inf: torch's operators do not agree on the result. Raises
    ValueError with every shape, dtype and device if the inputs do not fit together.
    """
    _check(query, key, value, mask, causal)
    if query.is_cuda and query.dtype != torch.float64:
        return _cuda(query, key, value, mask, causal)
    if query.device.type == "cpu" and query.dtype != torch.float64:
        mask = None if mask is None else mask[None, None]
        out, lse = _cpu(query[None], key[None], value[None], mask, causal)
        return Partial(out[0], lse[0])
    return reference_attention(query, key, value, mask=mask, causal=causal)


def attention_to_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[Partial]:
    """Compute attention of packed queries to each of several blocks of keys. The result is bitwise
    equal to `partial_attention` of one block after another.

    query: [kv_heads, rows, head_dim]
    key, value: [blocks, kv_heads, tokens, head_dim], last dimension contiguous

    On a CPU this is one call, which keeps all threads busy. Raises ValueError.
    """
    if query.device.type == "cpu" and query.dtype != torch.float64:
        _check(query, key[0], value[0], None, causal=False)
        outs, lses = _cpu(query.expand(len(key), *query.shape), key, value)
        return [Partial(*both) for both in zip(outs.unbind(), lses.unbind(), strict=True)]
    return [partial_attention(query, k, v) for k, v in zip(key, value, strict=True)]


def merge(partials: Sequence[Partial]) -> Partial:
    """Merge partial attentions over disjoint keys, in float32.

    The result depends on the order only by rounding; callers that need bitwise equality keep one
    order.
    """
    if len(partials) == 1:
        return partials[0]
    masses = torch.stack([part.lse for part in partials])
    outs = torch.stack([part.out for part in partials])
    merged = outs.float().mul_(masses.softmax(0).unsqueeze(-1)).sum(0).to(outs.dtype)
    return Partial(merged, masses.logsumexp(0))


def with_sinks(part: Partial, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the output of attention whose softmax has one more column for each head, without a
    value (StreamingLLM, Xiao et al., 2024; gpt-oss).

    part: the attention to all keys; its first two dimensions are the heads and their rows
    sinks: [heads] float32, scores of the columns; None for none

    Returns [heads, rows, head_dim].
    """
    if sinks is None:
        return part.out
    heads, head_dim = len(sinks), part.out.shape[-1]
    share = sigmoid(part.lse.reshape(heads, -1) - sinks.unsqueeze(1)).unsqueeze(-1)
    out = part.out.reshape(heads, -1, head_dim)
    return (out.float() * share).to(out.dtype)


def masses(part: Partial, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the log-sum-exps of a whole attention with its sinks, shaped as `part.lse`."""
    if sinks is None:
        return part.lse
    own = part.lse.reshape(len(sinks), -1)
    return torch.logaddexp(own, sinks.unsqueeze(1)).view(part.lse.shape)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> Partial:
    """Compute `partial_attention` in plain operations (float32 inside, float64 kept)."""
    scores = scaled_scores(query, key)
    if mask is not None:
        scores = scores + mask
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    weights, peak = weighed(scores)
    return plain_partial(weights, peak, value, query.dtype)


def weighed(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exp(scores - peak), computed in place, and the peak of each row, [..., 1].

    The peak of a row of -inf is 0.
    """
    peak = finite(scores.amax(-1, keepdim=True))
    return scores.sub_(peak).exp_(), peak


def plain_partial(
    weights: torch.Tensor, peak: torch.Tensor, value: torch.Tensor, dtype: torch.dtype
) -> Partial:
    """Return attention from the result of `weighed`. A row without weight gives 0, and -inf as
    lse.
    """
    total = weights.sum(-1, keepdim=True)
    out = (weights @ value.to(weights.dtype)).div_(total.where(total != 0, 1))
    return Partial(out.to(dtype), total.log_().add_(peak).squeeze(-1))


def scaled_scores(query: torch.Tensor, key: torch.Tensor, cap: float | None = None) -> torch.Tensor:
    """Return scores of keys [kv_heads, tokens, head_dim], in float32, or float64 as the query."""
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    scaled = query.to(compute) * query.shape[-1] ** -0.5
    scores = scaled @ key.to(compute).transpose(-1, -2)
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def finite(x: torch.Tensor) -> torch.Tensor:
    """Replace -inf by 0, so that subtracting the result from scores of -inf leaves them -inf."""
    return x.masked_fill(x == float("-inf"), 0)


def finite_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return an additive mask without -inf, with which attention is bitwise equal if no row is
    entirely -inf.

    A kernel that goes through keys block by block subtracts the greatest score so far. While a row
    has only seen keys of -inf, that is -inf - -inf, which is NaN; PyTorch's memory-efficient kernel
    handles this case in some versions only. With this mask the sums of such a row are finite, and
    they count for nothing once they are weighted against the first key that the row sees.
    """
    return mask.clamp(min=max(_LEAST_MASK, torch.finfo(mask.dtype).min))


def _cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with blocks of queries and keys, [blocks, kv_heads, rows or tokens, head_dim]."""
    rows = query.shape[2]
    few = rows < _CPU_ROWS and mask is None and not causal
    if few:
        # With fewer rows the rounding of the library's products depends on the address of a
        # thread's buffer, and so on which thread computes which head.
        query = torch.constant_pad_nd(query, (0, 0, 0, _CPU_ROWS - rows))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask
    )
    if few:
        return out[:, :, :rows].contiguous(), lse[:, :, :rows].contiguous()
    return out, lse


def _cuda(query, key, value, mask, causal) -> Partial:
    rows, head_dim = query.shape[-2:]
    # Both operators require head_dim in multiples of 8; columns of zeros change neither scores (the
    # scale is given) nor the kept part of the output.
    pad = -head_dim % 8
    q, k, v = (F.pad(t, (0, pad))[None] if pad else t[None] for t in (query, key, value))
    scale = head_dim**-0.5
    half = query.dtype in _HALF
    if (
        mask is None
        and half
        and head_dim <= _FLASH_HEAD_DIM
        and torch.cuda.get_device_capability(query.device) >= _FLASH_CAPABILITY
    ):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    else:
        if mask is not None:
            # Its rows must begin at multiples of 16 bytes; the padding is never read.
            mask = F.pad(finite_mask(mask), (0, -mask.shape[1] % _MASK_COLUMNS))[:, : mask.shape[1]]
            mask = mask.expand(1, *query.shape[:2], mask.shape[1])
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, 0.0, causal, scale=scale
        )
    # The log-sum-exp may be padded to a multiple of 32 rows.
    return Partial(out[0, ..., :head_dim], lse[0, :, :rows])


def _check(query, key, value, mask, causal) -> None:
    kv_heads, rows, head_dim = query.shape
    tokens = key.shape[1]
    require(
        "partial_attention",
        key.shape == value.shape == (kv_heads, tokens, head_dim)
        and tokens > 0
        and rows > 0
        and alike(query, key, value, mask)
        and not (causal and (mask is not None or rows != tokens))
        and (mask is None or mask.shape == (rows, tokens)),
        query=query,
        key=key,
        value=value,
        mask=mask,
        causal=causal,
    )
