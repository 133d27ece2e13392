"""Make the model directory that every system reads: dense safetensors without an end token."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# The number of values in a file of random weights.
_SHARD = 1 << 30
_NOISE = 1_000_003
_STD = 0.02


def prepared(model: Path, folder: Path) -> Path:
    """Return the directory for a checkpoint on disk; it is made once in `folder`."""
    stamp = f"{model.resolve()} {model.stat().st_mtime_ns}"
    target = folder / hashlib.sha256(stamp.encode()).hexdigest()[:16]
    if (target / "config.json").exists():
        return target
    making = target.with_suffix(".part")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    if model.is_dir():
        for file in model.iterdir():
            if file.suffix == ".safetensors" or file.name.endswith(".safetensors.index.json"):
                os.symlink(file.resolve(), making / file.name)
        config = json.loads((model / "config.json").read_text())
    else:
        config = _dense(model, making)
    _write_config(config, making)
    making.rename(target)
    return target


def of_shape(name: str, config: dict[str, Any], dtype: str, folder: Path) -> Path:
    """Return a directory with random weights of a shape; it is made once in `folder`."""
    target = folder / f"{name}-{dtype}"
    if (target / "config.json").exists():
        return target
    from transformers import AutoConfig, AutoModelForCausalLM

    making = target.with_suffix(".part")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(made).state_dict()
    if made.tie_word_embeddings:
        shapes.pop("lm_head.weight")
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)) * _STD
    noise = noise.to(getattr(torch, dtype))
    shard: dict[str, torch.Tensor] = {}
    where, held = {}, 0
    for i, (tensor, meta) in enumerate(shapes.items()):
        shard[tensor] = _random(tensor, tuple(meta.shape), noise)
        held += shard[tensor].numel()
        if held >= _SHARD or i == len(shapes) - 1:
            file = f"model-{len(set(where.values())):03}.safetensors"
            save_file(shard, making / file, metadata={"format": "pt"})
            where |= dict.fromkeys(shard, file)
            shard, held = {}, 0
    index = {"metadata": {}, "weight_map": where}
    (making / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_config(made.to_dict() | {"dtype": dtype}, making)
    making.rename(target)
    return target


def _random(name: str, shape: tuple[int, ...], noise: torch.Tensor) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(shape, dtype=noise.dtype)
    count = torch.Size(shape).numel()
    return noise.repeat(-(-count // len(noise)))[:count].view(shape)


def _dense(gguf: Path, folder: Path) -> dict[str, Any]:
    """Write the weights of a GGUF file as dense tensors. Return the model's config."""
    from transformers import AutoModelForCausalLM, utils

    utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, trust_remote_code=False, gguf_file=gguf.name, dtype=torch.float32
    )
    tensors = {name: each.contiguous() for name, each in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model.config.to_dict() | {"dtype": "float32"}


def _write_config(config: dict[str, Any], folder: Path) -> None:
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config, indent=1))
