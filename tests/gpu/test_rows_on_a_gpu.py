"""The same bits on a GPU (B2): a row's logits, and texts, whatever is computed beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import PLACEMENTS, random_ids
from same_bits_runs import alone, in_passes, in_trees, prefilled
from simulated_gpu import REAL

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.decoder import Ask
from triforce_offload.errors import UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted]
# The interpreter is slow, and computes no bfloat16.
PROMPT, TEXT, ROWS = (50, 150, (1, 2, 5, 17, 65)) if REAL else (20, 32, (5,))
DTYPES = ("bfloat16", "float16", "float32") if REAL else ("float16",)
HALF = DTYPES[0]


def engine(path: Path, dtype: str, **options: object) -> Engine:
    drafts = {"method": "speculative", "draft": "ngram", "draft_tokens": 64}
    options = {"dtype": dtype, "max_context": 256, "block_tokens": 64, **drafts, **options}
    return Engine.from_pretrained(path, device="cuda:0", same_bits="on", **options)


@pytest.mark.first
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma3", "gpt-oss-moe", "qwen3_moe", "qwen3", "llama-mqa"),
        *("olmo2", "granite", "phi3-longrope", "smollm3-windows", "olmoe"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_forward(tiny, family: str, dtype: str) -> None:
    path, _ = tiny(family)
    text = random_ids(TEXT, seed=1)
    with engine(path, dtype) as running:
        expected = alone(running, text, PROMPT)
        assert expected.std() > 1e-3, "it would be no test"
        different = {}
        for rows in ROWS:
            found = in_passes(running, text, PROMPT, rows)
            different[f"{rows} rows"] = (found != expected).any(1).sum().item()
        different["trees"] = (in_trees(running, text, PROMPT) != expected).any(1).sum().item()
        for length in (PROMPT + 1, TEXT):
            context, logits = prefilled(running, text[:length])
            context.close()
            different[f"prefill {length}"] = int(
                not torch.equal(logits[0], expected[length - PROMPT])
            )
    assert not any(different.values()), different


FORMATS = {
    "dense": {},
    "split": {"weights": "split", "kv": "split"},
    "KV streamed": {"placement": PLACEMENTS["kv"]},
    "weights streamed": {"placement": PLACEMENTS["weights"]},
    "both streamed, split": {"placement": PLACEMENTS["both"], "weights": "split", "kv": "split"},
    "one block for all": {"block_tokens": 256},
    "blocks of 128, streamed": {"block_tokens": 128, "placement": PLACEMENTS["kv"]},
}


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
def test_beside_other_sequences_and_after_cuts(tiny) -> None:
    from triforce_core.decoding.contexts.context import run_pass

    path, _ = tiny("llama")
    text = random_ids(TEXT, seed=3)
    with engine(path, "float16", sequences=3) as running:
        expected = alone(running, text, PROMPT)
        contexts = [prefilled(running, text[:length])[0] for length in (PROMPT, 71, 128)]
        for _ in range(3):
            asks = [Ask(torch.tensor(text[each.length : each.length + 7])) for each in contexts]
            for context, logits in zip(contexts, run_pass(contexts, asks), strict=True):
                first = context.length + 1 - PROMPT
                assert torch.equal(logits, expected[first : first + 7])
                context.keep(range(5))
        for context in contexts:
            context.close()


RETRIEVAL = {"method": "triforce", "budget": 64}
RUNS = {
    "chains": {},
    "trees": {"tree": 16},
    "trees of the retrieval level": {**RETRIEVAL, "tree": 24, "placement": PLACEMENTS["kv"]},
    "retrieval level": {**RETRIEVAL, "placement": PLACEMENTS["kv"]},
    "retrieval level over int4 copies": {**RETRIEVAL, "placement": PLACEMENTS["int4"]},
}


@pytest.mark.not_simulated("the interpreter would take too long")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_do_not_depend_on_what_drafts(tiny, dtype: str, temperature: float) -> None:
    prompts = [random_ids(90, seed=seed) for seed in range(3)]
    params = [SamplingParams(60, temperature=temperature, seed=seed) for seed in range(3)]
    for family in ("llama", "gemma3"):
        path, _ = tiny(family)
        found = {}
        for name, options in {"plain": {"method": "autoregressive"}, **RUNS}.items():
            options = {"accept": "coupled", "draft_tokens": 6, **options}
            with engine(path, dtype, **options) as running:
                done = running.generate_all(prompts, params)
            found[name] = [completion.token_ids for completion in done]
        assert all(texts == found["plain"] for texts in found.values()), family


def test_it_is_refused_where_it_cannot_hold(tiny) -> None:
    path, _ = tiny("qwen3_5")
    with pytest.raises(UsageError, match="not supported for recurrent layers on a GPU"):
        engine(path, HALF)
