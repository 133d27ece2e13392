"""Attention of new rows to keys that are all on the device, with room for the rows' own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax, with_sinks
from triforce_kernels.attention.streaming import attend_cache
from triforce_kernels.layer import rope_into


class DenseKeys(NamedTuple):
    """Keys and values of a layer, token after token, and where those of the next rows go.

    key, value: [kv_heads, capacity, head_dim]; the same tensor if the keys are the values too
    start: index of the first row's key, a number or [1] int64 on the device
    first: place in the text of the first key
    window: number of keys that each row attends to, its own included; None for all
    scale: of integers, see `rope_into`
    """

    key: torch.Tensor
    value: torch.Tensor
    start: int | torch.Tensor
    first: int = 0
    window: int | None = None
    scale: torch.Tensor | None = None


def attend_dense(
    keys: DenseKeys,
    qkv: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    softmax: Softmax = PLAIN,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values, and attend: [heads, rows, head_dim].

    qkv: [rows, heads + 2 kv_heads, head_dim]: queries, keys and values of the rows; see `rope_into`
    rotation: cosines and sines, [rows, head_dim] each
    visible: see `attend_tail`

    Raises ValueError.
    """
    query = rope_into(qkv, *rotation, keys.key, keys.value, keys.start, keys.scale)
    heads, tokens, head_dim = query.shape
    kv_heads = keys.key.shape[0]
    part = attend_cache(
        query.reshape(kv_heads, heads // kv_heads * tokens, head_dim),
        keys.key,
        keys.value,
        tokens,
        keys.start,
        keys.window,
        first=keys.first,
        visible=visible,
        cap=softmax.cap,
    )
    if keys.scale is not None:
        torch.mul(part.out, keys.scale[-1].unsqueeze(1), out=part.out)
    return with_sinks(part, softmax.sinks).reshape(query.shape)
