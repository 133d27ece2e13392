"""The same bits on a GPU (B2): a row's logits, and texts, whatever is computed beside them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import random_ids
from same_bits_runs import FORMATS, beside_others, differing, in_passes, texts_by_every_draft
from simulated_gpu import REAL

from triforce_core import Engine
from triforce_offload.errors import UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted]
# The interpreter is slow, and computes no bfloat16. Of these families each has kernels, or options
# of kernels, that the others do not have.
FAMILIES = ["gemma3", "gpt-oss-moe"]
if REAL:
    FAMILIES += ["llama", "qwen3_moe"]
    FAMILIES += ["qwen3", "llama-mqa", "olmo2", "granite", "phi3-longrope", "smollm3-windows"]
    FAMILIES += ["olmoe"]
PROMPT, TEXT, ROWS = (50, 150, (1, 2, 5, 17, 65)) if REAL else (20, 26, (5,))
DTYPES = ("bfloat16", "float16", "float32") if REAL else ("float16",)
HALF = DTYPES[0]


def engine(path: Path, dtype: str, **options: object) -> Engine:
    drafts = {"method": "speculative", "draft": "ngram", "draft_tokens": 64}
    options = {"dtype": dtype, "max_context": 256, "block_tokens": 64, **drafts, **options}
    return Engine.from_pretrained(path, device="cuda:0", same_bits="on", **options)


# In the interpreter it takes as long as fifty other tests.
@(pytest.mark.first if REAL else pytest.mark.slow)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_forward(tiny, family: str, dtype: str) -> None:
    path, _ = tiny(family)
    text = random_ids(TEXT, seed=1)
    with engine(path, dtype) as running:
        different = differing(running, text, PROMPT, ROWS, (PROMPT + 1, TEXT))
    assert not any(different.values()), different


@pytest.mark.not_simulated("split formats are bfloat16")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "gpt-oss-moe"])
def test_wherever_weights_and_kv_are_and_in_every_lossless_format(tiny, family: str) -> None:
    path, _ = tiny(family)
    text, found = random_ids(TEXT, seed=2), {}
    for name, options in FORMATS.items():
        with engine(path, "bfloat16", **options) as running:
            found[name] = in_passes(running, text, PROMPT, 5)
    # Split weights are multiplied in another order than dense ones.
    of = {name: "split" if "split" in name else "dense" for name in found}
    different = [name for name, base in of.items() if not torch.equal(found[name], found[base])]
    assert not different


@pytest.mark.not_simulated("the interpreter would take too long")
def test_beside_other_sequences(tiny) -> None:
    path, _ = tiny("llama")
    text = random_ids(TEXT, seed=3)
    with engine(path, "float16", sequences=3) as running:
        contexts, different = beside_others(running, text, (PROMPT, 71, 128))
        for context in contexts:
            context.close()
    assert not different


@pytest.mark.not_simulated("the interpreter would take too long")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_do_not_depend_on_what_drafts(tiny, dtype: str, temperature: float) -> None:
    for family in ("llama", "gemma3"):
        path, _ = tiny(family)
        found = texts_by_every_draft(partial(engine, path, dtype), temperature)
        assert all(texts == found["plain"] for texts in found.values()), family


def test_it_is_refused_where_it_cannot_hold(tiny) -> None:
    path, _ = tiny("qwen3_5")
    with pytest.raises(UsageError, match="not supported for recurrent layers on a GPU"):
        engine(path, HALF)
