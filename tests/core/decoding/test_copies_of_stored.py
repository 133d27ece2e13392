"""Draft copies of weights that are kept as stored, in FP8 or in GGUF's blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from fp8_files import FP8_RECURRENT, FP8_SIZES
from fp8_files import quantise as to_fp8
from gguf_files import write_gguf
from helpers import BLOCK, PLACEMENTS, make_model, random_ids

from triforce_core import Engine, SamplingParams
from triforce_kernels.weights.inputs import InputSizes
from triforce_kernels.weights.integers import dequantise
from triforce_offload.errors import UsageError
from triforce_offload.weights.layouts import Views

PROMPT, NEW = random_ids(75), 40
GREEDY = SamplingParams(NEW, temperature=0)


def engine(path: Path, **options: object) -> Engine:
    common = {"device": "cpu", "max_context": 120, "block_tokens": BLOCK}
    return Engine.from_pretrained(path, **common | {"budget": 32, "draft_tokens": 5} | options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placement", ["int4", "int4-in-part"])
@pytest.mark.parametrize("family", ["qwen3", "glm4", "qwen3_5"])
def test_copies_of_fp8_weights_draft_for_them(tmp_path, family: str, placement: str) -> None:
    more = FP8_RECURRENT if family == "qwen3_5" else {}
    to_fp8(tmp_path, make_model(family, tmp_path, initializer_range=0.1, **FP8_SIZES, **more))
    with engine(tmp_path, method="autoregressive", weights="dense") as plain:
        expected = plain.generate(PROMPT, GREEDY).token_ids
    options = {"weights": "stored", "placement": PLACEMENTS[placement], "draft": "none"}
    for dtype in ("float32", "bfloat16"):
        with engine(tmp_path, dtype=dtype, budget=112, **options) as drafting:
            result = drafting.generate(PROMPT, GREEDY)
            warm = drafting.generate(PROMPT, SamplingParams(NEW, temperature=1.0, seed=3))
        if dtype == "float32":
            assert result.token_ids == expected
        assert result.stats["levels"] == ["retrieval", "target"]
        copied = len(PLACEMENTS[placement].copied_layers)
        assert result.stats["placement"]["copied_layers"] == copied
        assert warm.stats["acceptance"]["target"] > 0.4


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_of_stored_weights_are_those_of_the_dense_ones(
    tmp_path, monkeypatch, dtype: str, alike: bool
) -> None:
    """To the last bit if all columns count alike. The rounding of products changes the sizes of
    inputs, and by them rarely a number. Matrices of several types stand one above the other.
    """
    if alike:
        monkeypatch.setattr(InputSizes, "of", lambda sizes, weight: None)
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    model = make_model("llama", tmp_path, **sizes)
    file = tmp_path / "m.gguf"
    write_gguf(model, file, gguf.GGMLQuantizationType.Q8_0, mixed=True)
    made = []
    options = {"dtype": dtype, "placement": PLACEMENTS["int4"], "draft_tokens": 4}
    for weights in ("dense", "stored"):
        with engine(file, weights=weights, draft_weights="int4", **options) as drafting:
            views = drafting.models.draft_copies.views
            made.append({layer: numbers_of(views[layer]) for layer in views})
    for layer, tensors in made[0].items():
        for name, tensor in tensors.items():
            off = (tensor - made[1][layer][name]).norm()
            assert off <= (0 if alike else 0.03) * tensor.norm(), (layer, name)


def numbers_of(views: Views) -> dict[str, torch.Tensor]:
    """The numbers of a copy's tensors in float32."""
    return {
        name: view.float() if isinstance(view, torch.Tensor) else dequantise(view)
        for name, view in views.items()
    }


def test_copies_that_are_no_smaller_than_the_layers_are_not_made(tmp_path) -> None:
    model = make_model("llama", tmp_path)
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q4_0)
    options = {"weights": "stored", "placement": PLACEMENTS["int4"]}
    with engine(tmp_path / "m.gguf", budget=None, **options) as running:
        assert running.generate(PROMPT, GREEDY).stats["levels"] == ["ngram", "target"]
        assert "copies of them do not fit or do not pay" in running.plan_line
    with pytest.raises(UsageError, match=r"draft copies take .* KiB, and the layers as they"):
        engine(tmp_path / "m.gguf", draft_weights="int4", **options)


@pytest.mark.parametrize("budget", [None, 112])
def test_copies_of_4_bit_weights_have_3_bits(tmp_path, budget: int | None) -> None:
    """Here with scales in 16 bits: they take .78 of the blocks' bytes."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    model = make_model("llama", tmp_path, initializer_range=0.1, **sizes)
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q4_0)
    options = {"weights": "stored", "dtype": "bfloat16", "placement": PLACEMENTS["int4"]}
    with engine(tmp_path / "m.gguf", budget=budget, **options) as running:
        stats = running.generate(PROMPT, SamplingParams(NEW, temperature=1.0, seed=3)).stats
    assert stats["levels"] == ["ngram", "retrieval", "target"]
    assert stats["retrieval"]["copy_bits"] == 3
    assert stats["acceptance"]["target"] > 0.2
