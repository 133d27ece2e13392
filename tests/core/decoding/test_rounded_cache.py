"""A retrieval cache in 8 bits: worse drafts, by little; the same text; about half the memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, FAMILIES, PLACEMENTS, random_ids
from tiny_families import CHOOSE_KEYS
from tiny_parts import LAYERS

from triforce_core import Engine, SamplingParams
from triforce_offload.errors import UsageError
from triforce_offload.kv.caches.rounded import RoundedKV

PROMPT = random_ids(75)
GREEDY = SamplingParams(40, temperature=0)
ROUNDED = {"draft_kv": "int8", "draft": "none"}


def engine(path: Path, **options: object) -> Engine:
    settings = {"device": "cpu", "max_context": 200, "block_tokens": BLOCK, "budget": 32}
    return Engine.from_pretrained(path, **settings | {"draft_tokens": 5} | options)


@pytest.mark.one_in(13)
@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in CHOOSE_KEYS])
def test_the_text_is_that_of_exact_kv(tiny, family: str) -> None:
    path, _ = tiny(family)
    with engine(path, method="autoregressive", budget=None) as plain:
        expected = plain.generate(PROMPT, GREEDY).token_ids
    with engine(path, placement=PLACEMENTS["kv-in-part"], **ROUNDED) as drafting:
        result = drafting.generate(PROMPT, GREEDY)
    assert result.token_ids == expected
    assert result.stats["retrieval"]["in_8_bits"]
    assert result.stats["bits_per_number"]["kv"]["drafted"] == 8


@pytest.mark.one_in(4)
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        {"kv": "split", "dtype": "bfloat16"},
        {"weights": "split", "draft_weights": "split", "dtype": "bfloat16"},
        pytest.param({"gpus": 2}, marks=pytest.mark.slow),
        {"draft": "ngram"},
    ],
    ids=str,
)
def test_the_text_is_that_of_exact_kv_with(tiny, options: dict[str, object]) -> None:
    path, _ = tiny("llama")
    placed = {"placement": PLACEMENTS["kv-in-part"]}
    texts = []
    for draft_kv in ("exact", "int8"):
        with engine(path, **placed | ROUNDED | options | {"draft_kv": draft_kv}) as drafting:
            result = drafting.generate(PROMPT, GREEDY)
        texts.append(result.token_ids)
        assert result.stats["retrieval"]["in_8_bits"] == (draft_kv == "int8")
    assert texts[0] == texts[1]


def test_most_of_what_it_drafts_holds(tiny) -> None:
    """Where it holds the whole text, only rounding is rejected."""
    path, _ = tiny("llama")
    sampled = SamplingParams(100, temperature=1.0, seed=1)
    with engine(path, budget=200, **ROUNDED) as drafting:
        for prompt in (PROMPT, random_ids(3), PROMPT[:20]):
            # Scales of another text, or of its first tokens, would not do.
            assert drafting.generate(prompt, sampled).stats["acceptance"]["target"] > 0.85


def test_scales_are_measured_again_whenever_the_text_has_doubled(tiny, monkeypatch) -> None:
    """Each time by all chunks that are there, and not by the few of a short prompt."""
    path, _ = tiny("llama")
    lengths: list[int] = []
    measure_again = RoundedKV.measure_again

    def recorded(kv: RoundedKV, tokens: int) -> None:
        lengths.append(tokens)
        measure_again(kv, tokens)

    monkeypatch.setattr(RoundedKV, "measure_again", recorded)
    with engine(path, budget=200, chunk_size=8, **ROUNDED) as drafting:
        drafting.generate(PROMPT[:20], SamplingParams(120, temperature=1.0, seed=1))
        context = drafting._contexts.latest
        measured = lengths[lengths.index(20) :]
        assert len(measured) >= 3
        for before, after in pairwise([*measured, 2 * context.length]):
            assert 2 * before <= after
        for before, after in pairwise(measured):
            # No pass keeps more than a draft of 5 and the token behind it.
            assert after < 2 * before + 6
        whole = measured[-1] // 8 * 8
        reach = 1.2 + measured[-1] ** -0.5
        for layer in range(LAYERS):
            peak = context.sequence.kv.on_host(layer)[:, :, :whole].abs().amax(2)
            torch.testing.assert_close(context.levels.retrieval.kv.scale[layer], peak * reach / 127)


def test_a_cache_takes_a_quarter_of_float32s_bytes(tiny) -> None:
    path, _ = tiny("llama")
    taken = {}
    for draft_kv in ("exact", "int8"):
        with engine(path, budget=128, **ROUNDED | {"draft_kv": draft_kv}) as drafting:
            stats = drafting.generate(PROMPT, GREEDY).stats
            taken[draft_kv] = drafting.runtime.plan.requirements.drafting_bytes
        memory = stats["memory"]
        assert memory["device_peak_bytes"] <= memory["device_budget_bytes"]
    tokens = 128 + 8 + 5
    kv_bytes = 2 * 3 * 2 * 16 * tokens * 4
    assert 0.6 * kv_bytes < taken["exact"] - taken["int8"] < 0.8 * kv_bytes


def test_unasked_a_cpu_keeps_it_exact(tiny) -> None:
    path, _ = tiny("llama")
    with engine(path, draft="none") as drafting:
        stats = drafting.generate(PROMPT, GREEDY).stats
    assert not stats["retrieval"]["in_8_bits"]
    assert stats["bits_per_number"]["kv"]["drafted"] == 32
    with pytest.raises(UsageError, match="draft_kv 'int3' is not one of auto, exact, int8"):
        engine(path, draft_kv="int3")
