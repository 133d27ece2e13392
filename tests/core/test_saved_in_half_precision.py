"""C2 in half precision: texts after a save and a load are those without (B2), to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import random_ids
from oracle import LogitsRecorder
from test_saved import FIRST, NEXT, PROMPT
from test_saved import engine as saving

from triforce_core import Engine, SamplingParams
from triforce_kernels.host.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled kernels")

BLOCK = 64
FAMILIES = ("llama", "exaone4-windows", "qwen3_5", "qwen3_moe", "lfm2", "nemotron_h-moe")


def engine(path: Path, placement: str, dtype: str, **options: object) -> Engine:
    """Rows have the same bits wherever what they need is, and whatever drafts."""
    running = saving(path, placement, dtype=dtype, block_tokens=BLOCK, **options)
    assert running.models.same_bits
    return running


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("saves", "loads"), [("resident", "resident"), ("kv", "resident"), ("resident", "both")]
)
@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_a_context_goes_on_as_if_it_had_not_been_saved(
    tiny, tmp_path, family: str, dtype: str, saves: str, loads: str, temperature: float
) -> None:
    path, saved = tiny(family)[0], tmp_path / "context"
    begin, go_on = (
        SamplingParams(count, temperature=temperature, seed=seed)
        for count, seed in ((FIRST, 3), (NEXT, 7))
    )
    with engine(path, saves, dtype) as first:
        begun = first.generate(PROMPT, begin).token_ids
        kept = first.save_context(saved)
        longer = [*PROMPT, *begun, 5, 6, 7]
        expected = first.generate(longer, go_on)
    with engine(path, loads, dtype) as other:
        assert other.load_context(saved).tokens == kept
        found = other.generate(longer, go_on)
    # Without a context, and without drafts.
    with engine(path, "resident", dtype, method="autoregressive", budget=None) as plain:
        fresh = plain.generate(longer, go_on)
    assert found.stats["reused_tokens"] == expected.stats["reused_tokens"] == kept
    assert fresh.stats["reused_tokens"] == 0
    assert found.token_ids == expected.token_ids == fresh.token_ids


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_logits_after_a_load_are_those_without(tiny, tmp_path, monkeypatch, family: str) -> None:
    path, recorder, found = tiny(family)[0], LogitsRecorder(monkeypatch), []
    params, longer = SamplingParams(NEXT, temperature=0), [*PROMPT, *random_ids(9, 4)]
    options = {"method": "autoregressive", "budget": None}
    with engine(path, "kv", "bfloat16", **options) as first:
        first.generate(PROMPT, SamplingParams(1))
        first.save_context(tmp_path / "context")
        recorder.take()
        first.generate(longer, params)
        found.append(recorder.take())
    with engine(path, "resident", "bfloat16", **options) as other:
        other.load_context(tmp_path / "context")
        other.generate(longer, params)
        found.append(recorder.take())
    assert found[0].isfinite().all()
    assert torch.equal(*found)
