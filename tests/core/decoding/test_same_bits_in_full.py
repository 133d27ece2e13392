"""The same bits (B2) in passes of every number of rows, with weights as they are stored, and in
greedy texts under the rule that is optimal for drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import pytest
from fp8_files import FP8_SIZES
from fp8_files import quantise as to_fp8
from gguf_files import write_gguf
from helpers import make_model, random_ids
from same_bits_runs import differing, texts_by_every_draft
from test_same_bits import KINDS, PROMPT, TEXT, engine

from triforce_core import SamplingParams
from triforce_kernels.host.library import library
from triforce_kernels.weights.block_types import BLOCK_TYPES, WITHOUT_KERNELS

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled kernels")

MOST_ROWS = 65
STORED = [kind for kind in BLOCK_TYPES if kind not in WITHOUT_KERNELS and kind != "MXFP4"]
# Rows of matrices are whole blocks of 256 numbers.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 16}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_row_has_the_same_bits_beside_any_number_of_others(tiny, family: str, dtype: str) -> None:
    text = random_ids(TEXT, seed=6)
    with engine(tiny(family)[0], dtype) as running:
        assert running.models.same_bits
        different = differing(running, text, PROMPT, range(1, MOST_ROWS + 1), ())
    assert not any(different.values()), different


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Callable[[str, str], Path]:
    """The file of a family in a GGUF block type."""
    made: dict[tuple[str, str], Path] = {}

    def of(family: str, kind: str) -> Path:
        if (family, kind) not in made:
            path = tmp_path_factory.mktemp("stored") / "m.gguf"
            twin = make_model(family, path.parent, **SIZES)
            write_gguf(twin, path, gguf.GGMLQuantizationType[kind])
            made[family, kind] = path
        return made[family, kind]

    return of


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stored_weights_give_a_row_the_same_bits(
    stored, kind: str, family: str, dtype: str
) -> None:
    text = random_ids(TEXT, seed=7)
    with engine(stored(family, kind), dtype, weights="stored") as running:
        layouts = running.runtime.weights.layouts
        kinds = {part.block_type.name for each in layouts for part in each.decoded()}
        different = differing(running, text, PROMPT, (2, 5, 17, MOST_ROWS), (PROMPT + 1, TEXT))
    assert kinds == {kind}
    assert not any(different.values()), different


@pytest.mark.parametrize("stored_in", ["FP8", "MXFP4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_floats_of_8_and_4_bits_give_a_row_the_same_bits(
    tmp_path, stored_in: str, dtype: str
) -> None:
    text = random_ids(TEXT, seed=8)
    if stored_in == "FP8":
        to_fp8(tmp_path, make_model("llama", tmp_path, **FP8_SIZES))
    else:
        make_model("gpt-oss-moe", tmp_path)
    with engine(tmp_path, dtype, weights="stored") as running:
        decoded = [part for each in running.runtime.weights.layouts for part in each.decoded()]
        assert any(part.block_type for part in decoded)
        different = differing(running, text, PROMPT, (2, 5, 17, MOST_ROWS), (PROMPT + 1, TEXT))
    assert not any(different.values()), different


@pytest.mark.first
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_greedy_texts_do_not_depend_on_drafts_under_either_rule(
    tiny, family: str, dtype: str
) -> None:
    """Those under the coupled rule are compared in test_same_bits.py."""
    load = partial(engine, tiny(family)[0], dtype)
    found = texts_by_every_draft(load, 0.0, "optimal")
    with load(method="autoregressive", accept="coupled") as running:
        params = SamplingParams(60, temperature=0)
        found["coupled"] = [
            list(running.generate(random_ids(90, seed=seed), params).token_ids) for seed in range(3)
        ]
    assert all(texts == found["plain"] for texts in found.values())
