"""GGUF files in Q6_K and Q5_K that are split: the text of the stored numbers."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from gguf_files import write_gguf
from helpers import make_model
from split_texts import GREEDY, PROMPT, STREAMED, check_texts, engine

from triforce_core.model.known.shapes import read_model
from triforce_core.model.tensors import split_layouts
from triforce_core.plan.formats import splits_blocks
from triforce_kernels.weights.block_types import BLOCK_TYPES, HIGH_QUANTS
from triforce_offload.plan.placement import Placement
from triforce_offload.weights.formats import DTYPES

# Rows that are whole blocks of 256.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 2}
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 256,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 256,
    "v_head_dim": 64,
}
# The type of a file's matrices, and that of some in even layers, if it is another. The second file
# has a layer of which nothing can be split.
FILES = {
    "Q6_K": ("llama", "Q6_K", None),
    "Q8_0 and Q6_K": ("llama", "Q8_0", "Q6_K"),
    "Q5_K and Q8_0": ("qwen3", "Q5_K", "Q8_0"),
    "Q6_K, recurrent": ("qwen3_5", "Q6_K", None),
    "Q6_K, latent": ("glm4_lite-moe", "Q6_K", None),
}
MORE = {"qwen3_5": RECURRENT, "glm4_lite-moe": LATENT}


@pytest.fixture(scope="module", params=FILES)
def quantised(request, tmp_path_factory) -> Path:
    family, *types = FILES[request.param]
    path = tmp_path_factory.mktemp("quants")
    model = make_model(family, path, **SIZES | MORE.get(family, {}))
    kind, larger = (name and gguf.GGMLQuantizationType[name] for name in types)
    write_gguf(model, path / "m.gguf", kind, larger=larger)
    return path / "m.gguf"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STREAMED)
def test_what_streams_by_its_low_bits_gives_the_text(quantised, name: str, dtype: str) -> None:
    """And the high bits draft for it."""
    check_texts(quantised, name, dtype)


def test_layers_in_files_are_split_each_time_they_cross(tmp_path) -> None:
    model = make_model("llama", tmp_path, **SIZES)
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q6_K)
    in_files = Placement((0, 1, 2), False, 0, 2, 3, 2, file_layers=(0, 1, 2))
    texts = []
    for weights, placement in (("stored", None), ("split", in_files)):
        options = {"placement": placement, "method": "autoregressive", "weights": weights}
        with engine(tmp_path / "m.gguf", **options) as running:
            texts.append(running.generate(PROMPT, GREEDY).token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("mix", ["Q6_K", "Q5_K_M", "Q4_K_M", "Q8_0"])
def test_types_that_cannot_be_split_stay_as_they_are_stored(mix: str) -> None:
    shape = read_model(f"qwen3-32b:{mix}")
    config, dtype = shape.config, DTYPES["bfloat16"]
    assert splits_blocks(config, dtype, shape.pieces) == (mix != "Q8_0")
    layouts = split_layouts(config, dtype, pieces=shape.pieces)
    formats = [each for layer in layouts.layers for each in layer.formats.values()]
    found = {part.block_type for each in formats for part in each.decoded()}
    assert {BLOCK_TYPES[name] for name in HIGH_QUANTS} & found or mix == "Q8_0"
    for each in formats:
        for part in each.decoded():
            assert part.split == (part.block_type.name in HIGH_QUANTS)
    # Rows of the ends are looked up, and all of the head is read for each draft.
    assert not layouts.head.formats["head"].split


def test_a_file_of_which_nothing_can_be_split_is_split_in_bfloat16(tmp_path) -> None:
    model = make_model("llama", tmp_path)
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q4_0)
    options = {"dtype": "bfloat16", "method": "autoregressive"}
    bits = {}
    for weights in ("dense", "split"):
        with engine(tmp_path / "m.gguf", weights=weights, **options) as running:
            result = running.generate(PROMPT, GREEDY)
        bits[weights] = result.stats["bits_per_number"]["weights"]["stored"], result.token_ids
    assert 12 < bits["split"][0] < 14 < 16 <= bits["dense"][0]
    assert bits["split"][1] == bits["dense"][1]
