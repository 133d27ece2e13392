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


def quantise_as_mistral(directory: Path, model: torch.nn.Module, projections: int) -> None:
    """Writes a checkpoint, and its twin, as Mistral Small 4 is published: in FP8 with a scale for
    each matrix, experts stacked, beside scales of inputs, as the language model of one that reads
    images.

    projections: number of scales of an expert's gate and up projections
    """
    made = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        path = "language_model." + name
        if "proj" not in name:
            made[path] = tensor
            continue
        count = projections if "gate_up" in name else 1
        parts = tensor.unflatten(-2, (count, -1))
        scales = parts.abs().amax((-1, -2), keepdim=True) / 448
        numbers = (parts / scales).to(torch.float8_e4m3fn)
        model.get_parameter(name).data.copy_((numbers.float() * scales).view_as(tensor))
        made[path] = numbers.view_as(tensor)
        stacked = tensor.dim() == 3
        made[f"{path}_scale_inv"] = scales.view(-1, count, 1) if stacked else scales.view(())
        inputs = f"{path}_" if stacked else path.removesuffix("weight")
        made[f"{inputs}activation_scale"] = torch.ones(tensor.shape[:-2])
    quantised = {
        "activation_scheme": "static",
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    }
    made["vision_tower.patch_conv.weight"] = torch.ones(4, 3, 2, 2)
    write(directory, made, quantised)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "quantization_config": config.pop("quantization_config"),
        "text_config": config,
        "vision_config": {"model_type": "pixtral"},
    }
    file.write_text(json.dumps(whole))


def write(directory: Path, tensors: dict[str, torch.Tensor], config: dict) -> None:
    """Writes the tensors of a checkpoint, and how they are quantised."""
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
