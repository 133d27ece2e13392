"""FP8 with block scales, as Qwen3 and others are published: the text of the dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp8_files import FP8_RECURRENT, FP8_SIZES, quantise
from helpers import BLOCK, PLACEMENTS, make_model, random_ids
from oracle import assert_equal_but_for_ties
from safetensors.torch import load_file, save_file

from triforce_core import Engine, SamplingParams
from triforce_offload.errors import CheckpointError, UnsupportedModelError

PROMPT, NEW = random_ids(60), 24
GREEDY = SamplingParams(NEW, temperature=0)


@pytest.fixture(scope="module", params=["qwen3", "glm4", "qwen3_5"])
def quantised(request, tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """glm4 has its heads in another order, and gate and up as one tensor; qwen3_5 queries, keys and
    values of recurrent layers.
    """
    path = tmp_path_factory.mktemp("fp8")
    more = FP8_RECURRENT if request.param == "qwen3_5" else {}
    model = make_model(request.param, path, **FP8_SIZES, **more)
    quantise(path, model)
    return path, model


def engine(path: Path, **options: object) -> Engine:
    return Engine.from_pretrained(
        path, **{"device": "cpu", "max_context": 90, "block_tokens": BLOCK, **options}
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("weights", ["dense", "stored"])
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
    assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs)
    elements = sum(p.numel() for n, p in model.named_parameters() if "layers.0." in n)
    if weights == "stored":
        # Vectors are not quantised, and everything is aligned.
        assert layer < 1.04 * elements + 24576
    else:
        assert layer >= 4 * elements


def test_scales_that_do_not_fit_are_refused(tmp_path) -> None:
    model = make_model("llama", tmp_path, **FP8_SIZES)
    quantise(tmp_path, model)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
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
