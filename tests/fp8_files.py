"""Writes tiny checkpoints in FP8 with block scales, as Qwen3 and others are published."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP8_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "head_dim": 64,
    "num_key_value_heads": 1,
}
# Recurrent layers, whose rows of columns that are multiples of 128.
FP8_RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 40,
    "linear_value_head_dim": 32,
}
# Latent attention: keys and values of a head have 80 rows together, no multiple of 128. Layers have
# no experts: drafts of random ones that choose other experts are seldom accepted.
FP8_LATENT = {
    "first_k_dense_replace": 3,
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "v_head_dim": 32,
}
CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def in_twin(model: torch.nn.Module, name: str) -> torch.Tensor:
    """The numbers of a tensor of the files in the model, which has all experts in two tensors."""
    found = re.match(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if found is None:
        return model.get_parameter(name).data
    prefix, expert, part = found.groups()
    stacked = "down_proj" if part == "down" else "gate_up_proj"
    numbers = model.get_parameter(f"{prefix}.{stacked}").data[int(expert)]
    return numbers if part == "down" else numbers.chunk(2)[part == "up"]


def is_projection(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is quantised. As published, rates and decays stay as they are."""
    rates = "in_proj_a" in name or "in_proj_b" in name
    return "proj" in name and not rates and tensor.dim() == 2


def quantise(directory: Path, model: torch.nn.Module) -> None:
    """Writes the layers' matrices of a checkpoint, and of its twin, in FP8. Rows of k and v are no
    multiple of 128.
    """
    tensors, made = load_file(directory / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not is_projection(name, tensor):
            made[name] = tensor
            continue
        rows, columns = tensor.shape
        padded = torch.zeros(-(-rows // 128) * 128, columns)
        padded[:rows] = tensor
        tiles = padded.view(-1, 128, columns // 128, 128)
        scales = tiles.abs().amax((1, 3)) / 448
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows]
        numbers = (tensor / whole).to(torch.float8_e4m3fn)
        made[name], made[f"{name}_scale_inv"] = numbers, scales
        in_twin(model, name).copy_(numbers.float() * whole)
    write(directory, made, CONFIG)


def write(directory: Path, tensors: dict[str, torch.Tensor], config: dict) -> None:
    """Writes the tensors of a checkpoint, and how they are quantised."""
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
