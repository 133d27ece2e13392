"""Writes tiny checkpoints with experts in MXFP4, as gpt-oss is published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

_MXFP4 = GGMLQuantizationType.MXFP4


def to_mxfp4(directory: Path, model: torch.nn.Module) -> None:
    """Writes the experts of a checkpoint in MXFP4, and gives its twin the same numbers. There a
    matrix is transposed.
    """
    file = directory / "model.safetensors"
    made = {}
    for name, tensor in load_file(file).items():
        if not name.endswith(("gate_up_proj", "down_proj")) or "experts" not in name:
            made[name] = tensor
            continue
        rows = tensor.transpose(1, 2).contiguous().numpy()
        blocks = quantize(rows, _MXFP4)
        numbers = torch.from_numpy(dequantize(blocks, _MXFP4))
        model.get_parameter(name).data.copy_(numbers.transpose(1, 2))
        made[f"{name}_blocks"], made[f"{name}_scales"] = _as_published(blocks)
    save_file(made, file, {"format": "pt"})


def _as_published(blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [..., blocks, 16], each with two numbers that follow one another, and exponents."""
    each = blocks.reshape(*blocks.shape[:-1], -1, 17)
    numbers = np.concatenate((each[..., 1:] & 15, each[..., 1:] >> 4), -1)
    pairs = numbers[..., ::2] | numbers[..., 1::2] << 4
    return torch.from_numpy(pairs.copy()), torch.from_numpy(each[..., 0].copy())
