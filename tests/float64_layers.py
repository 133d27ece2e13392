"""Parts of layers in float64, from their definitions, with which drafters are compared."""

from __future__ import annotations

import torch

EPS = 1e-6


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x: torch.Tensor, places: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate queries or keys [rows, heads, head_dim] by their places [rows]."""
    half = x.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (places[:, None] * inverse)[:, None]
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
