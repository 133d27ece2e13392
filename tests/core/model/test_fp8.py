"""FP8 as Qwen3, Mistral Small 4 and others are published: the text of the dequantised weights."""

from __future__ import annotations

from contextlib import nullcontext as noted
from math import prod
from pathlib import Path

import pytest
import torch
from fp8_files import FP8_LATENT, FP8_RECURRENT, FP8_SIZES, quantise, quantise_as_mistral
from helpers import PLACEMENTS, make_model
from oracle import assert_equal_but_for_ties
from safetensors.torch import load_file, save_file
from split_texts import GREEDY, NEW, PROMPT, STREAMED, check_texts, engine

from triforce_core.model.known.shapes import read_model
from triforce_core.model.tensors import split_layouts
from triforce_core.plan.formats import split_weights
from triforce_core.plan.simulation.case import Case
from triforce_kernels.weights.block_types import F8_E4M3, BlockType
from triforce_offload.checkpoint.safetensors import SafetensorsSource
from triforce_offload.checkpoint.source import Corner
from triforce_offload.errors import CheckpointError, UnsupportedModelError
from triforce_offload.machine.profiles import named
from triforce_offload.weights.formats import DTYPES

FAMILIES = {
    "qwen3": FP8_SIZES,
    "glm4": FP8_SIZES,
    "qwen3_5": FP8_SIZES | FP8_RECURRENT,
    "deepseek_v3-moe": FP8_LATENT,
}


@pytest.fixture(scope="module", params=FAMILIES)
def quantised(request, tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """glm4 has its heads in another order, and gate and up as one tensor; qwen3_5 queries, keys and
    values of recurrent layers; deepseek_v3 the matrices of keys transposed.
    """
    path = tmp_path_factory.mktemp("fp8")
    model = make_model(request.param, path, **FAMILIES[request.param])
    quantise(path, model)
    return path, model


@pytest.mark.one_in(2)
@pytest.mark.parametrize("weights", ["dense", "stored", "split"])
@pytest.mark.parametrize("placement", ["resident", "both", "weights-one-slot"])
def test_greedy_text_is_that_of_the_dequantised_model(
    quantised, weights: str, placement: str
) -> None:
    path, model = quantised
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    theirs = theirs[0, len(PROMPT) :].tolist()
    options = {"weights": weights, "placement": PLACEMENTS[placement], "method": "autoregressive"}
    with engine(path, **options) as running:
        result = running.generate(PROMPT, GREEDY)
        layer = running.runtime.plan.requirements.layer_bytes[0]
        config = running.models.target.config
    assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs)
    elements = sum(p.numel() for n, p in model.named_parameters() if "layers.0." in n)
    if weights != "dense":
        # Vectors are not quantised, nor what is stored transposed, and everything is aligned.
        shapes = config.layers[0].shapes(config.hidden)
        assert layer < 1.04 * elements + 24576 + 3 * prod(shapes.get("k_up", (0,)))
    else:
        assert layer >= 4 * elements


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STREAMED)
def test_what_streams_by_its_low_bits_gives_the_text(quantised, name: str, dtype: str) -> None:
    """And the high bits draft for it."""
    check_texts(quantised[0], name, dtype)


@pytest.mark.parametrize("projections", [1, 2])
def test_mistral_small_4_as_it_is_published(tmp_path, projections: int) -> None:
    """A scale for each matrix, and stacked experts."""
    model = make_model("mistral4-moe", tmp_path, **FP8_LATENT | {"first_k_dense_replace": 1})
    quantise_as_mistral(tmp_path, model, projections)
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    theirs, sizes = theirs[0, len(PROMPT) :].tolist(), {}
    for weights in ("dense", "stored", "split"):
        options = {"placement": PLACEMENTS["weights"], "method": "autoregressive"}
        with pytest.warns(RuntimeWarning, match="reads images"):
            running = engine(tmp_path, weights=weights, **options)
        with running:
            result = running.generate(PROMPT, GREEDY)
            sizes[weights] = running.runtime.plan.requirements.layer_bytes[2]
        assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs)
    assert max(sizes["stored"], sizes["split"]) < 0.4 * sizes["dense"]


@pytest.mark.parametrize(
    "scales", [(), (1,), (3,), (3, 1, 1), (3, 2), (3, 2, 1), (3, 256), (3, 256, 1), (3, 2, 2)]
)
def test_matrices_of_experts_in_one_tensor(tmp_path, scales: tuple[int, ...]) -> None:
    """Any rows of them, with a scale for all, for each, for each half, each row, or each tile."""
    torch.manual_seed(0)
    numbers = torch.randn(3, 256, 256).to(torch.float8_e4m3fn)
    factors = torch.rand(scales) + 1
    save_file({"m": numbers, "m_scale_inv": factors}, tmp_path / "model.safetensors")
    columns = 2 if scales == (3, 2, 2) else 1
    tiles = factors.expand(3, 1, 1) if factors.numel() == 1 else factors.view(3, -1, columns)
    whole = tiles.repeat_interleave(256 // tiles.shape[1], 1)
    whole = numbers.float() * whole.repeat_interleave(256 // columns, 2)
    source = SafetensorsSource(tmp_path)
    assert (source.shape("m"), source.blocks("m")) == ((3, 256, 256), F8_E4M3)
    for corner, shape in (
        (Corner(0, 0), (768, 256)),
        (Corner(256, 0), (128, 256)),
        (Corner(384, 128), (128, 128)),
        (Corner(500, 0), (150, 128)),
    ):
        read = torch.empty(shape)
        source.read("m", read, corner)
        expected = whole.flatten(0, 1)[corner.row :, corner.column :]
        assert torch.equal(read, expected[: shape[0], : shape[1]])
    source.close()


def tensors_of_llama(path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The file of a llama in FP8, and its tensors."""
    quantise(path, make_model("llama", path, **FP8_SIZES))
    file = path / "model.safetensors"
    return file, load_file(file)


def test_a_matrix_with_too_many_small_numbers_is_not_split(tmp_path) -> None:
    file, tensors = tensors_of_llama(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    small = tensors[name].float()
    small[:, 1:] *= 2.0**-10
    save_file(tensors | {name: small.to(torch.float8_e4m3fn)}, file)
    texts = []
    for weights in ("stored", "split"):
        warned = weights == "split"
        with (
            pytest.warns(RuntimeWarning, match="layers.1.down is not split") if warned else noted(),
            engine(tmp_path, weights=weights) as running,
        ):
            texts.append(running.generate(PROMPT, GREEDY).token_ids)
            formats = running.runtime.plan.requirements
    assert texts[0] == texts[1]
    assert formats.low_bytes[1] < formats.low_bytes[0]


def test_a_plan_stores_matrices_of_16_bits_as_a_gpu_does(tmp_path) -> None:
    """In the dtype of the pass, where no kernel multiplies by them as they are."""
    file, tensors = tensors_of_llama(tmp_path)
    name = "model.layers.1.self_attn.o_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, file)
    shape = read_model(str(tmp_path))
    for dtype in ("bfloat16", "float32"):
        layer = Case(shape.config, named("rtx4090"), 512, dtype=DTYPES[dtype], pieces=shape.pieces)
        stored, matrix = layer.layouts.layers[:2], tensors[name]
        assert [kind.name for kind in layer.layouts.block_types] == [F8_E4M3.name]
        scales = matrix.numel() // 128**2 * 4
        more = stored[1].nbytes - stored[0].nbytes
        assert abs(more - matrix.numel() * (DTYPES[dtype].itemsize - 1) + scales) < 1024


def test_scales_that_do_not_fit_are_refused(tmp_path) -> None:
    file, tensors = tensors_of_llama(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    save_file(tensors | {name: torch.ones(2, 1)}, file)
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale_inv is missing or not of"):
        engine(tmp_path)
    save_file({n: t for n, t in tensors.items() if n != name}, file)
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale_inv is missing or not of"):
        engine(tmp_path)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path) -> None:
    make_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(UnsupportedModelError, match=r"up_proj.weight is F8_E4M3 of shape"):
        engine(tmp_path)


def test_rows_that_are_looked_up_stay_as_they_are_stored() -> None:
    shape = read_model("qwen3-8b:FP8")
    config = shape.config

    def pieces(name: str) -> list[tuple[int, BlockType | None]]:
        return shape.pieces(name) if "." in name else [(config.vocab_rows, F8_E4M3)]

    layouts = split_layouts(config, DTYPES["bfloat16"], pieces=pieces)
    for each in (layouts.head.formats["head"], layouts.embedding.formats["embedding"]):
        assert each.block_type is F8_E4M3
        assert not each.split
    assert all(layer.formats["qkv"].split for layer in layouts.layers)
    unsplit = {f"layers.{i}.{part}" for i in range(36) for part in ("qkv", "o", "gate_up", "down")}
    for name in ("bfloat16", "float16"):
        stored = split_weights("split", config, DTYPES[name], unsplit, shape.pieces)
        assert not any(layer.low_bytes for layer in stored.layers)
