"""NVFP4, as compressed-tensors and ModelOpt store it: the text of the dequantised model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp8_files import FP8_SIZES, in_twin, is_projection, write
from helpers import PLACEMENTS, make_model
from oracle import assert_equal_but_for_ties
from safetensors.torch import load_file, save_file
from split_texts import GREEDY, NEW, PROMPT, engine

from triforce_core.model.known.mixes import mix_of
from triforce_offload.checkpoint.quantised.methods import Method, quantisation
from triforce_offload.errors import CheckpointError, UnsupportedModelError

LEVELS = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCHEME = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CONFIGS = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": SCHEME, "input_activations": SCHEME}},
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


def to_nvfp4(directory: Path, model: torch.nn.Module, way: str) -> None:
    """Writes the layers' matrices of a checkpoint, and of its twin, in NVFP4."""
    made = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not is_projection(name, tensor):
            made[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, 16))
        # A power of two, so that dividing by it and multiplying are the same.
        factor = 2.0 ** torch.ceil(torch.log2(groups.abs().amax() / (6 * 448)))
        scales = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        whole = (scales.float() * factor).unsqueeze(-1)
        sizes = (groups.abs() / whole.clamp_min(1e-30)).unsqueeze(-1)
        codes = (sizes - LEVELS).abs().argmin(-1).byte()
        codes = (codes | (groups < 0).byte() << 3).flatten(1)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        prefix = name.removesuffix("weight")
        if way == "modelopt":
            parts = {"weight": packed, "weight_scale_2": factor.view(()).clone()}
            parts["input_scale"] = torch.tensor(1.0)
        else:
            parts = {"weight_packed": packed, "weight_global_scale": (1 / factor).view(1)}
            parts["input_global_scale"] = torch.ones(1)
        made |= {prefix + part: each for part, each in (parts | {"weight_scale": scales}).items()}
        numbers = LEVELS[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
        in_twin(model, name).copy_(numbers * whole.expand_as(groups).flatten(1))
    write(directory, made, CONFIGS[way])


@pytest.mark.parametrize("way", CONFIGS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_greedy_text_is_that_of_the_dequantised_model(tmp_path, family: str, way: str) -> None:
    sizes = FP8_SIZES | {"num_attention_heads": 2}
    more = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    model = make_model(family, tmp_path, **sizes, **more)
    to_nvfp4(tmp_path, model, way)
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    theirs = theirs[0, len(PROMPT) :].tolist()
    for options in ({"weights": "dense"}, {"weights": "stored", "placement": PLACEMENTS["both"]}):
        with engine(tmp_path, method="autoregressive", **options) as running:
            text = running.generate(PROMPT, GREEDY).token_ids
            parts = [part for each in running.runtime.weights.layouts for part in each.decoded()]
        assert_equal_but_for_ties(model, PROMPT, text, theirs)
        kinds = {part.block_type.name for part in parts if part.block_type}
        assert kinds == ({"NVFP4"} if options["weights"] == "stored" else set())


@pytest.mark.parametrize(
    ("part", "change", "error", "message"),
    [
        (
            "weight_scale",
            lambda t: t[:, 1:].contiguous(),
            CheckpointError,
            "weight_scale is missing",
        ),
        ("weight_global_scale", None, CheckpointError, "weight_global_scale is missing or not one"),
        ("weight_global_scale", lambda t: t.half(), UnsupportedModelError, "is F16; supported are"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, part, change, error, message) -> None:
    sizes = FP8_SIZES | {"num_attention_heads": 2}
    to_nvfp4(tmp_path, make_model("llama", tmp_path, **sizes), "compressed-tensors")
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), f"model.layers.1.mlp.down_proj.{part}"
    old = tensors.pop(name)
    save_file(tensors if change is None else tensors | {name: change(old)}, file)
    with pytest.raises(error, match=message):
        engine(tmp_path)


def test_the_method_is_known() -> None:
    for config in CONFIGS.values():
        found = quantisation(config)
        assert found.method is Method.NVFP4
        assert mix_of(found) == "NVFP4"
