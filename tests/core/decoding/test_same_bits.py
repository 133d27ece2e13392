"""The same bits (B2): a row's logits do not depend on what is computed beside it.

The text is decoded token by token, and its logits are compared with those of passes of several
rows, of trees, of prefills, at every placement, and beside other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FAMILIES, make_model, random_ids, turns
from same_bits_runs import (
    FORMATS,
    alone,
    beside_others,
    differing,
    in_passes,
    prefilled,
    texts_by_every_draft,
)
from tiny_families import CHOOSE_KEYS

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.decoder import PassInput
from triforce_kernels import dispatch
from triforce_kernels.dispatch import REFERENCE
from triforce_kernels.host import attention, weights
from triforce_kernels.host.library import library
from triforce_offload.errors import UsageError

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled kernels")

BLOCK = 64
# Passes begin before, at and behind the edge of a block, of a window and of a folded state.
PROMPT, TEXT = 50, 150
ROWS = (1, 2, 5, 17, 65)
DTYPES = ("float32", "bfloat16", "float16")
# No kernel caps scores.
CAPPED = "gemma2"


def engine(path: Path, dtype: str, **options: object) -> Engine:
    drafts = {"method": "speculative", "draft": "ngram", "draft_tokens": 64}
    options = {"dtype": dtype, "max_context": 256, "block_tokens": BLOCK, **drafts, **options}
    return Engine.from_pretrained(path, device="cpu", **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in paths:
            paths[family] = tmp_path_factory.mktemp(family)
            make_model(family, paths[family])
        return paths[family]

    return of


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.one_in(10)
@pytest.mark.parametrize(
    ("family", "dtype", "threads"),
    [
        (family, *each)
        for index, family in enumerate(FAMILIES)
        for each in turns(product(DTYPES, (1, 3)), index, 2)
        if family not in (CAPPED, *CHOOSE_KEYS)
    ],
    indirect=["threads"],
)
def test_a_row_has_the_same_bits_in_every_forward(
    models, family: str, dtype: str, threads: int
) -> None:
    text = random_ids(TEXT, seed=1)
    with engine(models(family), dtype) as running:
        # Dynamic scaling rotates a longer prompt otherwise.
        lengths = () if family == "dynamic-rope" else (PROMPT + 1, 100, TEXT)
        different = differing(running, text, PROMPT, ROWS, lengths)
    assert not any(different.values()), different


def test_models_that_cap_scores_are_refused(models) -> None:
    with engine(models(CAPPED), "float32") as running:
        assert not running.models.same_bits
    with pytest.raises(UsageError, match="not supported for gemma2 models: no kernel caps scores"):
        engine(models(CAPPED), "float32", same_bits="on")


KINDS = (
    "llama",
    "gemma3",
    "qwen3_5",
    "qwen3_moe",
    "gpt-oss-moe",
    "laguna-moe",
    "lfm3",
    "afmoe-moe",
)


@pytest.mark.parametrize("family", KINDS)
def test_wherever_weights_and_kv_are_and_in_every_lossless_format(models, family: str) -> None:
    text, found = random_ids(TEXT, seed=2), {}
    for name, options in FORMATS.items():
        with engine(models(family), "bfloat16", **options) as running:
            found[name] = in_passes(running, text, PROMPT, 5)
    different = [name for name, rows in found.items() if not torch.equal(rows, found["dense"])]
    assert not different


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "qwen3_5", "lfm2", "olmoe", "nemotron_h-latent-moe"]
)
def test_beside_other_sequences_and_after_cuts(models, family: str) -> None:
    """Three sequences of different lengths in each pass; one is cut and goes on with the same."""
    text = random_ids(TEXT, seed=3)
    with engine(models(family), "float16", sequences=3) as running:
        contexts, different = beside_others(running, text, (PROMPT, 71, 128))
        assert not different
        cut = contexts[2]
        cut.prefill([*text[:100], *random_ids(20, seed=4)], TEXT, lambda layer: None)
        assert cut.prefill(text, TEXT, lambda layer: None).reused >= 50
        assert torch.equal(cut.run(PassInput(torch.tensor([5]))), _after(running, text, 5))
        for context in contexts:
            context.close()


def _after(running: Engine, text: Sequence[int], token: int) -> torch.Tensor:
    """The logits of a token after a text that is prefilled at once."""
    context, _ = prefilled(running, text)
    logits = context.run(PassInput(torch.tensor([token])))
    context.close()
    return logits


@pytest.mark.first
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_texts_do_not_depend_on_what_drafts(models, whole, dtype: str, temperature: float) -> None:
    for family in ("gemma3", "llama")[: 2 if whole else 1]:
        found = texts_by_every_draft(partial(engine, models(family), dtype), temperature)
        assert all(texts == found["plain"] for texts in found.values()), family


def _elsewhere(own: Callable) -> Callable:
    """Attention of several rows whose keys begin one place later."""

    def keys(call: Any, key: torch.Tensor, value: torch.Tensor, first: int) -> None:
        own(call, key, value, first + (call.rows > 2))

    return keys


def _by_library(own: Callable) -> Callable:
    """Products of several rows in another order of sums."""

    def multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return own(x, weight) if len(x) == 1 else torch.nn.functional.linear(x, weight)

    return multiplied


FAULTS = {
    "attention that begins elsewhere": (
        attention,
        "describe_keys",
        _elsewhere(attention.describe_keys),
    ),
    "products by a library": (weights, "dense_matmul", _by_library(weights.dense_matmul)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(models, monkeypatch, fault: str) -> None:
    text = random_ids(TEXT, seed=1)
    with engine(models("llama"), "float32") as running:
        expected = alone(running, text, PROMPT)
        monkeypatch.setattr(*FAULTS[fault])
        dispatch._load.cache_clear()
        assert not torch.equal(in_passes(running, text, PROMPT, 17), expected)
    monkeypatch.undo()
    dispatch._load.cache_clear()


@pytest.mark.parametrize("tokens", [16, 32])
def test_small_blocks_are_refused(models, tokens: int) -> None:
    with pytest.raises(UsageError, match="needs KV blocks of 64 tokens or more"):
        engine(models("llama"), "float32", same_bits="on", block_tokens=tokens)


def test_it_is_refused_where_it_cannot_hold(models, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "_forced", REFERENCE)
    with pytest.raises(
        UsageError, match="--same-bits on needs the compiled kernels of a CPU or Triton on a GPU"
    ):
        engine(models("llama"), "float32", same_bits="on")
    with engine(models("llama"), "float32") as running:
        assert not running.generate(random_ids(5), SamplingParams(2)).stats["same_bits"]


def test_it_can_be_left_out(models) -> None:
    for asked, holds in (("off", False), ("auto", True), ("on", True)):
        with engine(models("llama"), "float32", same_bits=asked) as running:
            assert running.generate(random_ids(5), SamplingParams(2)).stats["same_bits"] is holds
