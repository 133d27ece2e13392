"""L4: greedy float32 output is transformers' own, token for token, for every family.
L5: and its logits are bitwise the same wherever weights and KV live.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import BLOCK, FAMILIES, PLACEMENTS, make_model, random_ids
from oracle import LogitsRecorder, assert_equal_but_for_ties, greedy

from triforce_core import Engine

PROMPT, NEW = 75, 45


def engine(path, placement: str = "resident", **options: object) -> Engine:
    return Engine.from_pretrained(
        path,
        **{
            "device": "cpu",
            "max_context": 200,
            "block_tokens": BLOCK,
            "placement": PLACEMENTS[placement],
            "dtype": "float32",
            **options,
        },
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_transformers(tiny, whole, family: str) -> None:
    path, model = tiny(family)
    with engine(path, "both", method="autoregressive") as ours:
        for seed in range(3 if whole else 1):
            prompt = random_ids(PROMPT, seed)
            # A copy, since dynamic rope in transformers remembers the longest text it has seen.
            theirs = (
                copy.deepcopy(model)
                .generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, PROMPT:]
                .tolist()
            )
            result = ours.generate(prompt, greedy())
            assert len(set(theirs)) > 5, "the model says too little to compare"
            assert_equal_but_for_ties(model, prompt, result.token_ids, theirs)


@pytest.mark.parametrize("prompt_tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 130])
def test_any_prompt_length_equals_transformers(tiny, prompt_tokens: int) -> None:
    path, model = tiny("llama")
    prompt = random_ids(prompt_tokens, 9)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
    with engine(path, "both") as ours:
        result = ours.generate(prompt, greedy(40))
    assert_equal_but_for_ties(model, prompt, result.token_ids, theirs[0, prompt_tokens:].tolist())


@pytest.mark.first
@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "qwen2", "qwen3", "glm4", "smollm3-windows"]
)
def test_placements_are_bitwise_equal(tiny, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = tiny(family)
    recorder = LogitsRecorder(monkeypatch)
    prompt = random_ids(PROMPT)
    logits = {}
    for name in PLACEMENTS:
        with engine(path, name, method="autoregressive") as ours:
            result = ours.generate(prompt, greedy())
            logits[name] = recorder.take()
        streamed = len(ours.config.layers) - result.stats["placement"]["resident_weight_layers"]
        assert streamed == len(PLACEMENTS[name].streamed_layers)
        assert (result.stats["link"]["bytes_to_device"] > 0) == (name != "resident")
    for name, rows in logits.items():
        assert rows.isfinite().all(), name
        if PLACEMENTS[name].processor_kv:
            # What the processor and the device attended to is merged last.
            torch.testing.assert_close(rows, logits["resident"], rtol=1e-4, atol=1e-4)
            continue
        assert torch.equal(rows, logits["resident"]), name


def test_end_of_text_ends_the_output_as_in_transformers(tmp_path) -> None:
    model = make_model("llama", tmp_path)
    prompt = random_ids(PROMPT)
    free = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    free = free[0, PROMPT:].tolist()
    stop = next(token for i, token in enumerate(free) if i > 8 and token not in free[:i])
    make_model("llama", tmp_path, eos_token_id=[stop, 96])
    theirs = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=stop
    )[0, PROMPT:].tolist()
    with engine(tmp_path) as ours:
        result = ours.generate(prompt, greedy())
        assert result.token_ids == theirs
        assert result.finish_reason == "stop"
        early = ours.generate(prompt, greedy(stop_token_ids=(theirs[3],)))
        assert early.token_ids == theirs[: theirs.index(theirs[3]) + 1]
        assert early.finish_reason == "stop"
        assert ours.generate(prompt, greedy(4)).finish_reason == "length"


def test_requests_do_not_disturb_each_other(tiny) -> None:
    path, _ = tiny("dynamic-rope")
    prompts = [random_ids(n, n) for n in (120, 20, 75, 20, 120)]
    with engine(path, "both") as ours:
        together = [ours.generate(prompt, greedy(20)).token_ids for prompt in prompts]
    alone = []
    for prompt in prompts:
        with engine(path, "resident") as ours:
            alone.append(ours.generate(prompt, greedy(20)).token_ids)
    assert together == alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(tiny, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision rounds differently, so no equal tokens are asked for: only logits as close to
    the float32 ones as transformers' own in that precision, within a factor of two.
    """
    path, model = tiny("llama")
    recorder = LogitsRecorder(monkeypatch)
    prompt = random_ids(PROMPT)
    with engine(path, "both", dtype=dtype, method="autoregressive") as ours:
        result = ours.generate(prompt, greedy(10))
    logits = recorder.take()
    with torch.no_grad():
        full = model(torch.tensor([prompt + result.token_ids[:-1]])).logits[0, PROMPT - 1 :]
        half = copy.deepcopy(model).to(getattr(torch, dtype))
        theirs = half(torch.tensor([prompt + result.token_ids[:-1]])).logits[0, PROMPT - 1 :]
    assert (logits - full).abs().max() < 2 * (theirs.float() - full).abs().max()
