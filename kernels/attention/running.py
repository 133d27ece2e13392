"""The state of an attention whose keys come piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triforce_kernels.dispatch import implementation


@dataclass
class Running:
    """Attention over the keys seen so far, not normalised, in one or more splits.

    acc: [splits, kv_heads, rows, head_dim] sum of exp(score - peak) * value
    peak, total: [splits, kv_heads, rows] greatest score, and sum of exp(score - peak)
    fresh: whether nothing was added yet; the tensors are then uninitialised
    keys: place in the text of the next key
    cap: see `Softmax`

    Tensors are float32, or float64 if the query is. Each split has its own part of every piece of
    keys, so that one sequence fills a GPU; `attend_tail` merges the splits.
    """

    acc: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    fresh: bool = True
    keys: int = 0
    cap: float | None = None

    @classmethod
    def of(cls, query: torch.Tensor, cap: float | None = None) -> Running:
        """Return a fresh state for queries [kv_heads, rows, head_dim]."""
        splits = 1 if cap is not None else implementation("attention_splits", query.device)(query)
        size = (splits, *query.shape)
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        acc = torch.empty(size, dtype=dtype, device=query.device)
        return cls(acc, acc.new_empty(size[:-1]), acc.new_empty(size[:-1]), cap=cap)
