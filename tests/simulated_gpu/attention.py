"""Attention operators that only CUDA has, with what their kernels ask for and give."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from simulated_gpu.tensor import GpuTensor, call, special

# The memory-efficient kernel gives log-sum-exps for so many rows at a time.
_LSE_ROWS = 32
_FLASH_HEAD_DIM = 256


@special("_scaled_dot_product_flash_attention")
def flash(
    func: Callable,
    query: GpuTensor,
    key: GpuTensor,
    value: GpuTensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, for half precision alone."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if query.shape[-1] > _FLASH_HEAD_DIM:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    _check(query, key, value)
    out, lse = call(_attend, (query, key, value, None, is_causal, scale), {})
    return (out, lse, None, None, query.shape[2], key.shape[2], None, None, None)


@special("_scaled_dot_product_efficient_attention")
def efficient(
    func: Callable,
    query: GpuTensor,
    key: GpuTensor,
    value: GpuTensor,
    attn_bias: GpuTensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_efficient_attention; its log-sum-exps come padded."""
    _check(query, key, value)
    if attn_bias is not None:
        bytes_a_row = attn_bias.inner.stride(-2) * attn_bias.inner.element_size()
        if attn_bias.shape[-2] > 1 and bytes_a_row % 16:
            raise RuntimeError("attn_bias is not correctly aligned")
        if attn_bias.dtype != query.dtype:
            raise RuntimeError("invalid dtype for bias - should match query's dtype")
    out, lse = call(_attend, (query, key, value, attn_bias, is_causal, scale), {})
    padded = torch.full(
        (*lse.shape[:2], -(-lse.shape[2] // _LSE_ROWS) * _LSE_ROWS), math.inf, device=query.device
    )
    padded[..., : lse.shape[2]] = lse
    return out, padded, None, None


def _check(query: GpuTensor, key: GpuTensor, value: GpuTensor) -> None:
    for tensor in (query, key, value):
        head_dim = tensor.shape[-1]
        if head_dim % 8 or tensor.inner.stride(-1) != 1:
            raise RuntimeError(f"the kernel cannot take a head_dim of {head_dim} with such strides")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = query.float() * (scale or query.shape[-1] ** -0.5) @ key.float().mT
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    out = (scores.softmax(-1) @ value.float()).to(query.dtype)
    # In memory the kernels' results have the rows before the heads.
    return out.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1)
