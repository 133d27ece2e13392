"""AWQ, GPTQ and compressed-tensors: the text of the dequantised weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp8_files import FP8_LATENT, FP8_RECURRENT, FP8_SIZES, in_twin, is_projection, write
from helpers import PLACEMENTS, make_model
from integer_files import WAYS, Quantised, to_integers
from oracle import assert_equal_but_for_ties
from safetensors.torch import load_file, save_file
from split_texts import GREEDY, NEW, PROMPT, engine

from triforce_core.model.families.hf import from_hf
from triforce_core.model.known.mixes import mix_of
from triforce_core.model.known.shapes import read_model
from triforce_kernels.weights.block_types import INTEGERS
from triforce_offload.checkpoint.quantised.methods import Method, quantisation
from triforce_offload.checkpoint.safetensors import SafetensorsSource
from triforce_offload.checkpoint.source import Corner
from triforce_offload.errors import CheckpointError, UnsupportedModelError

FAMILIES = {
    "llama": FP8_SIZES,
    "glm4": FP8_SIZES,
    "qwen3_5": FP8_SIZES | FP8_RECURRENT,
    "deepseek_v3-moe": FP8_LATENT,
    "qwen3_moe": FP8_SIZES | {"moe_intermediate_size": 128},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=WAYS)
def quantised(request, family, tmp_path_factory) -> tuple[Path, torch.nn.Module, str]:
    path = tmp_path_factory.mktemp("int4")
    model = make_model(family, path, **FAMILIES[family])
    to_integers(path, model, request.param)
    return path, model, request.param


@pytest.mark.one_in(5)
@pytest.mark.parametrize("weights", ["dense", "stored"])
@pytest.mark.parametrize("placement", ["resident", "both", "weights-one-slot"])
def test_greedy_text_is_that_of_the_dequantised_model(
    quantised, weights: str, placement: str
) -> None:
    path, model, way = quantised
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    theirs = theirs[0, len(PROMPT) :].tolist()
    options = {"weights": weights, "placement": PLACEMENTS[placement], "method": "autoregressive"}
    with engine(path, **options) as running:
        result = running.generate(PROMPT, GREEDY)
        parts = [part for each in running.runtime.weights.layouts for part in each.decoded()]
    kinds = {part.block_type.name for part in parts if part.block_type}
    assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs)
    group, bits = WAYS[way].group, WAYS[way].bits
    assert kinds <= {f"INT{bits}_{size}" for size in INTEGERS[bits] if group in (size, -1)}
    assert bool(kinds) == (weights == "stored")


@pytest.mark.parametrize("way", ["gptq", "auto-round", "w4a16"])
def test_drafts_change_no_token(tmp_path, way: str) -> None:
    """Copies in 3 bits draft for layers that stream. They take too much beside larger groups."""
    sizes = FP8_SIZES | {"hidden_size": 256, "intermediate_size": 512}
    to_integers(tmp_path, make_model("qwen3", tmp_path, initializer_range=0.1, **sizes), way)
    common = {"weights": "stored", "dtype": "bfloat16"}
    with engine(tmp_path, method="autoregressive", **common) as plain:
        expected = plain.generate(PROMPT, GREEDY).token_ids
    options = {"placement": PLACEMENTS["int4"], "budget": 80, "draft": "none", "draft_tokens": 4}
    with engine(tmp_path, **common, **options) as drafting:
        result = drafting.generate(PROMPT, GREEDY)
    assert result.token_ids == expected
    assert result.stats["levels"] == ["retrieval", "target"]
    assert result.stats["retrieval"]["copy_bits"] == 3
    assert result.stats["acceptance"]["target"] > 0.2


@pytest.mark.parametrize("way", WAYS)
def test_a_part_is_that_of_the_whole(tmp_path, way: str) -> None:
    """Rows from any row on, and columns from any block on."""
    torch.manual_seed(4)
    stored = WAYS[way]
    each = Quantised.of(torch.randn(104, 384), stored)
    tensors = {f"a.{part}": tensor for part, tensor in stored.tensors(each).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, quantisation(stored.config))
    assert source.names() == {"a.weight"}
    assert source.shape("a.weight") == (104, 384)
    size = source.blocks("a.weight").elements
    assert size == (128 if stored.group == -1 else stored.group)
    for row, rows, column, columns in (
        (0, 104, 0, 384),
        (0, 1, 0, size),
        (13, 40, size, 2 * size),
        (103, 1, 384 - size, size),
        (8, 16, 0, 384),
        # Decoding takes any column.
        (5, 9, 3, 200),
    ):
        part = torch.empty(rows, columns)
        source.read("a.weight", part, Corner(row, column))
        assert torch.equal(part, each.numbers[row : row + rows, column : column + columns])
    source.close()


def test_zeros_of_gptq_carry_as_in_gptqmodel(tmp_path) -> None:
    """Zeros of 0 are stored as 15, with a borrow from the next: subtracted from all 32 bits."""
    each = Quantised.of(torch.randn(8, 64), WAYS["gptq"])
    zeros = torch.tensor([0, 1, 0, 0, 15, 8, 0, 3])[:, None]
    each = replace(each, zeros=zeros)
    tensors = WAYS["gptq-v2"].tensors(each)
    tensors["qzeros"] = tensors["qzeros"] - 0x11111111
    save_file({f"a.{part}": t for part, t in tensors.items()}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, quantisation(WAYS["gptq"].config))
    numbers = torch.empty(8, 64)
    source.read("a.weight", numbers)
    assert torch.equal(numbers, each.numbers)
    source.close()


def _changed(tmp_path: Path, way: str, change: dict) -> None:
    """A llama in one of WAYS, some tensors of a layer of which are changed, or left out."""
    to_integers(tmp_path, make_model("llama", tmp_path, **FP8_SIZES), way)
    file = tmp_path / "model.safetensors"
    tensors, prefix = load_file(file), "model.layers.1.mlp.down_proj."
    for part, made in change.items():
        old = tensors.pop(prefix + part)
        if made is not None:
            tensors[prefix + part] = made(old).contiguous()
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("way", "change", "error", "message"),
    [
        ("awq", {"qzeros": None}, CheckpointError, "down_proj.qzeros is missing or does not fit"),
        ("awq", {"scales": None}, CheckpointError, "down_proj.scales is missing or does not fit"),
        ("gptq", {"qzeros": lambda t: t[:, 1:]}, CheckpointError, "qzeros is missing or does not"),
        ("gptq", {"scales": lambda t: t[:, 1:]}, CheckpointError, "scales is missing or does not"),
        ("gptq", {"g_idx": lambda t: t.flip(0)}, UnsupportedModelError, r"desc_act, actorder"),
        (
            "gptq",
            {"scales": lambda t: t.float()},
            UnsupportedModelError,
            "scales is F32; supported",
        ),
        ("gptq", {"qweight": lambda t: t.short()}, CheckpointError, "scales is missing or does"),
        ("gptq", {"qweight": lambda t: t[1:]}, CheckpointError, "scales is missing or does not"),
        ("awq", {"qweight": lambda t: t[:, 1:]}, CheckpointError, "scales is missing or does not"),
        ("w4a16", {"weight_scale": None}, CheckpointError, "weight_scale is missing or does not"),
        (
            "w4a16",
            {"weight_scale": lambda t: t[:, :3]},
            CheckpointError,
            "scale is missing or does",
        ),
        (
            "gptq",
            {"g_idx": lambda t: t.long()},
            UnsupportedModelError,
            "g_idx is I64; supported a",
        ),
        (
            "w8a16",
            {"weight_scale": lambda t: t.repeat_interleave(24, 1)},
            UnsupportedModelError,
            "a scale for each 16 numbers; supported are multiples of 32",
        ),
        (
            "w4a16-asym",
            {"weight_zero_point": lambda t: t[1:]},
            CheckpointError,
            "weight_zero_point is missing or does not fit",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path, way: str, change: dict, error: type[Exception], message: str
) -> None:
    _changed(tmp_path, way, change)
    with pytest.raises(error, match=message):
        engine(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_biases_of_zeros_are_left_out(tmp_path, family: str) -> None:
    """GPTQ's files often have one beside every matrix, also where the model has none."""
    to_integers(tmp_path, make_model(family, tmp_path, **FP8_SIZES), "gptq")
    file = tmp_path / "model.safetensors"
    with engine(tmp_path, method="autoregressive") as running:
        expected = running.generate(PROMPT, GREEDY).token_ids
    tensors = load_file(file)
    rows = {
        name.replace("scales", "bias"): tensor.shape[1]
        for name, tensor in tensors.items()
        if name.endswith(".scales")
    }
    biases = {name: torch.zeros(count, dtype=torch.float16) for name, count in rows.items()}
    save_file(biases | tensors, file)
    with engine(tmp_path, method="autoregressive") as running:
        assert running.generate(PROMPT, GREEDY).token_ids == expected
    name = "model.layers.1.mlp.down_proj.bias"
    save_file(biases | tensors | {name: torch.ones(rows[name])}, file)
    with pytest.raises(UnsupportedModelError, match=r"holds model.layers.1.mlp.down_proj.bias"):
        engine(tmp_path)


def test_a_plan_of_a_folder_knows_which_matrices_are_quantised(tmp_path) -> None:
    to_integers(tmp_path, make_model("llama", tmp_path, **FP8_SIZES), "w4a16")
    file, prefix = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj."
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    save_file(kept | {f"{prefix}weight": torch.zeros(128, 384, dtype=torch.bfloat16)}, file)
    pieces = read_model(str(tmp_path)).pieces
    assert [kind.name for _, kind in pieces("layers.0.down")] == ["INT4_32"]
    assert [kind.name for _, kind in pieces("layers.1.down")] == ["BF16"]


METHODS = [
    ({"quant_method": "fp8"}, Method.FP8),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, Method.FP8),
    ({"quant_method": "fbgemm_fp8"}, Method.FP8),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, Method.FP8),
    ({"quant_method": "mxfp4"}, Method.MXFP4),
    ({"quant_method": "gptq", "bits": 4, "desc_act": False}, Method.GPTQ),
    (WAYS["awq"].config, Method.AWQ),
    (WAYS["gptq"].config, Method.GPTQ),
    (WAYS["gptq-v2"].config, Method.GPTQ_V2),
    ({"quant_method": "gptq", "bits": 4, "format": "gptq_v2"}, Method.GPTQ_V2),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*attn.*": {}}}, Method.GPTQ),
    (WAYS["auto-round"].config, Method.GPTQ),
    (WAYS["w4a16"].config | {"transform_config": {"config_groups": {}}}, Method.PACKED),
    (WAYS["w4a16-asym"].config, Method.PACKED),
    (WAYS["w8a16"].config, Method.PACKED),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {
                    "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
                    "input_activations": {"dynamic": True},
                }
            },
        },
        Method.FP8,
    ),
]


@pytest.mark.parametrize(("config", "method"), METHODS)
def test_methods_are_known(config: dict, method: Method) -> None:
    assert quantisation(config).method is method


@pytest.mark.parametrize("way", WAYS)
def test_bits_and_groups_are_those_of_the_config(way: str) -> None:
    stored = WAYS[way]
    found = quantisation(stored.config)
    assert (found.bits, found.group) == (stored.bits, stored.group)
    names = {128: f"INT{stored.bits}", -1: f"INT{stored.bits}"}
    assert mix_of(found) == names.get(stored.group, f"INT{stored.bits}_{stored.group}")


@pytest.mark.parametrize(
    ("way", "change", "message"),
    [
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported .only 'gemm'"),
        ("awq", {"bits": 8}, "bits 8 is not supported"),
        ("gptq", {"desc_act": True}, "GPTQ with desc_act .columns in another order. is not"),
        ("gptq", {"group_size": 48}, "a scale for each 48 numbers, no multiple of 32, is not"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "some matrices in 8 bits .dynamic. is"),
        ("auto-round", {"extra_config": {"a": {"bits": 8}}}, "in 8 bits .extra_config. is not"),
        ("gptq", {"quant_method": None}, "without a method, as MLX writes it, is not supported"),
        ("w4a16", {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
        ("w4a16", {"transform_config": {"config_groups": {"a": {}}}}, "weights are rotated"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not"),
        ("auto-round", {"packing_format": "auto_round:llm_compressor"}, "packing_format"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24"),
        ("w4a16", {"config_groups": {}}, "a checkpoint with 0 formats of weights"),
        ("gptq", {"quant_method": "bitsandbytes"}, "method 'bitsandbytes' is not supported"),
        ("gptq", {"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo 'W4A8'"),
        ("w4a16", {"actorder": "group"}, "actorder 'group' is not supported"),
        ("w4a16", {"num_bits": 3}, "num_bits 3 is not supported"),
        ("w4a16", {"strategy": "tensor"}, "strategy 'tensor' is not supported"),
        ("w4a16", {"type": "float"}, "floats of 4 bits, as in MXFP4, is not supported"),
        ("w4a16", {"group_size": 16}, "a scale for each 16 numbers, no multiple of 32, is not"),
    ],
)
def test_other_methods_are_refused_by_name(way: str, change: dict, message: str) -> None:
    config = json.loads(json.dumps(WAYS[way].config))
    if set(change) & {"actorder", "num_bits", "strategy", "type"} or (
        way == "w4a16" and "group_size" in change
    ):
        config["config_groups"]["group_0"]["weights"] |= change
    else:
        config |= change
    with pytest.raises(UnsupportedModelError, match=message):
        quantisation(config)


def test_two_formats_in_one_file_are_refused() -> None:
    config = json.loads(json.dumps(WAYS["w4a16"].config))
    group = json.loads(json.dumps(config["config_groups"]["group_0"]))
    group["weights"]["group_size"] = 64
    config["config_groups"]["group_1"] = group
    with pytest.raises(UnsupportedModelError, match="a checkpoint with 2 formats of weights"):
        quantisation(config)


@pytest.mark.parametrize("scales", ["rows", "a vector of rows", "one", "a number"])
def test_fp8_with_other_scales_is_that_of_the_dequantised_model(tmp_path, scales: str) -> None:
    """As compressed-tensors and ModelOpt write them, with scales of inputs and of KV beside."""
    model = make_model("llama", tmp_path, **FP8_SIZES)
    made = {"model.layers.0.self_attn.k_scale": torch.tensor(1.0)}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not is_projection(name, tensor):
            made[name] = tensor
            continue
        each = tensor.abs().amax(1, keepdim=True) / 448
        each = each if scales.endswith("rows") else each.amax()[None, None]
        numbers = (tensor / each).to(torch.float8_e4m3fn)
        shaped = {"a vector of rows": each[:, 0], "one": each[0], "a number": each[0, 0]}
        made[name], made[f"{name}_scale"] = numbers, shaped.get(scales, each).clone()
        made[name.replace("weight", "input_scale")] = torch.tensor(2.0)
        made[name.replace("weight", "activation_scale")] = torch.tensor(2.0)
        in_twin(model, name).copy_(numbers.float() * each)
    write(tmp_path, made, {"quant_method": "modelopt", "quant_algo": "FP8"})
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    for options in ({"weights": "dense"}, {"weights": "stored", "placement": PLACEMENTS["both"]}):
        with engine(tmp_path, method="autoregressive", **options) as running:
            text = running.generate(PROMPT, GREEDY).token_ids
        assert_equal_but_for_ties(model, PROMPT, text, theirs[0, len(PROMPT) :].tolist())


def test_a_config_with_integers_is_read() -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 2}
    raw |= {"intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 10}
    raw |= {"max_position_embeddings": 100, "quantization_config": WAYS["awq"].config}
    assert from_hf(raw, {}).hidden == 64
    with pytest.raises(UnsupportedModelError, match="MXFP4 is not supported for a llama model"):
        from_hf(raw | {"quantization_config": {"quant_method": "mxfp4"}}, {})
