"""Writes tiny checkpoints in integers of 4 or 8 bits, as AWQ, GPTQ and compressed-tensors store
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from fp8_files import in_twin, is_projection, write
from safetensors.torch import load_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Quantised:
    """A matrix [out, in] in integers: number = (integer - zero) * scale.

    integers: [out, in], of `bits` bits
    scales, zeros: [out, groups]
    """

    integers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int

    @classmethod
    def of(cls, matrix: torch.Tensor, way: Way) -> Quantised:
        columns, most = matrix.shape[1], (1 << way.bits) - 1
        groups = matrix.float().unflatten(1, (-1, columns if way.group == -1 else way.group))
        if way.symmetric:
            scales = groups.abs().amax(-1) / (most / 2)
            zeros = torch.full_like(scales, (most + 1) // 2)
        else:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scales = (high - low) / most
            # The integer that stands for 0, but never 0, which GPTQ cannot store.
            zeros = (-low / scales).round().clamp(1, most)
        scales = scales.to(way.dtype)
        integers = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
        return cls(integers.flatten(1).int(), scales, zeros.int(), way.bits)

    @property
    def numbers(self) -> torch.Tensor:
        columns = self.integers.shape[1] // self.scales.shape[1]
        zeros, scales = (t.repeat_interleave(columns, 1) for t in (self.zeros, self.scales))
        return (self.integers - zeros) * scales.float()


def packed(
    integers: torch.Tensor, dim: int, bits: int, order: tuple[int, ...] = ()
) -> torch.Tensor:
    """Integers of a dimension in those of 32 bits: the lowest bits are those of `order[0]`."""
    order = order or tuple(range(32 // bits))
    parts = integers.transpose(0, dim).long().unflatten(0, (-1, len(order)))
    words = sum(parts[:, which] << bits * place for place, which in enumerate(order))
    return words.to(torch.int32).transpose(0, dim).contiguous()


def _awq(each: Quantised) -> dict[str, torch.Tensor]:
    return {
        "qweight": packed(each.integers.T, 1, 4, AWQ_ORDER),
        "qzeros": packed(each.zeros.T, 1, 4, AWQ_ORDER),
        "scales": each.scales.T.contiguous(),
    }


def _gptq(each: Quantised, *, less: int = 1) -> dict[str, torch.Tensor]:
    columns = each.integers.shape[1]
    group = columns // each.scales.shape[1]
    return {
        "qweight": packed(each.integers.T, 0, each.bits),
        "qzeros": packed(each.zeros.T - less, 1, each.bits),
        "scales": each.scales.T.contiguous(),
        "g_idx": (torch.arange(columns) // group).int(),
    }


def _gptq_v2(each: Quantised) -> dict[str, torch.Tensor]:
    return _gptq(each, less=0)


def _symmetric(each: Quantised) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": packed(each.integers, 1, each.bits),
        "weight_scale": each.scales,
        "weight_shape": torch.tensor(each.integers.shape),
    }


def _asymmetric(each: Quantised) -> dict[str, torch.Tensor]:
    padded = torch.nn.functional.pad(each.zeros, (0, 0, 0, -len(each.zeros) % (32 // each.bits)))
    return _symmetric(each) | {"weight_zero_point": packed(padded, 0, each.bits)}


def _weights(**more: object) -> dict:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group"} | more
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class Way:
    """A way of storing integers: what a matrix becomes, and what config.json says of it."""

    tensors: Callable[[Quantised], dict[str, torch.Tensor]]
    config: dict
    group: int
    dtype: torch.dtype = torch.float16
    symmetric: bool = False
    bits: int = 4


WAYS = {
    "awq": Way(_awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, 128),
    "gptq": Way(_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64}, 64),
    "gptq-v2": Way(
        _gptq_v2,
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
        -1,
        torch.bfloat16,
    ),
    "auto-round": Way(
        _gptq,
        {
            **{"quant_method": "auto-round", "bits": 4, "group_size": 32},
            "packing_format": "auto_round:auto_gptq",
        },
        32,
        symmetric=True,
    ),
    "w4a16": Way(_symmetric, _weights(group_size=32), 32, torch.bfloat16, symmetric=True),
    "w4a16-asym": Way(_asymmetric, _weights(group_size=128), 128, torch.bfloat16),
    "gptq-int8": Way(_gptq, {"quant_method": "gptq", "bits": 8, "group_size": 128}, 128, bits=8),
    "w8a16": Way(_asymmetric, _weights(strategy="channel", num_bits=8), -1, torch.bfloat16, bits=8),
}


def to_integers(directory: Path, model: torch.nn.Module, way: str) -> None:
    """Writes the layers' matrices of a checkpoint, and of its twin, in one of WAYS."""
    made, stored = {}, WAYS[way]
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not is_projection(name, tensor):
            made[name] = tensor
            continue
        each = Quantised.of(tensor, stored)
        prefix = name.removesuffix("weight")
        made |= {prefix + part: part_of for part, part_of in stored.tensors(each).items()}
        in_twin(model, name).copy_(each.numbers)
    write(directory, made, stored.config)
