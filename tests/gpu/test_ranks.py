"""Ranks on a real device: two that share one GPU, and one on each where there are two."""

from __future__ import annotations

import pytest
from helpers import BLOCK, placed, random_ids
from simulated_gpu import REAL, TOKENS

from triforce_core import Engine, SamplingParams
from triforce_offload.errors import UsageError

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0)
OPTIONS = {"max_context": 200, "block_tokens": BLOCK, "dtype": "float32", "device_memory": "2GiB"}
# One GPU that both share, through host memory; or one each, over NCCL, as graphs where that is on.
DEVICES = [
    "cuda:0",
    pytest.param("cuda", marks=pytest.mark.gpus(2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "placement"),
    [
        *(("llama", "both"), ("qwen3", "resident"), ("gpt-oss-moe", "processor")),
        *((("llama", "kv"), ("llama-mqa", "int4")) if REAL else ()),
    ],
)
def test_two_ranks_say_what_one_says(tiny, family: str, placement: str, device: str) -> None:
    path, _ = tiny(family)
    options = placed(placement, OPTIONS | {"budget": 32, "draft_tokens": 6})
    texts = []
    for gpus in (1, 2):
        with Engine.from_pretrained(path, device=device, gpus=gpus, **options) as engine:
            first = engine.generate(random_ids(75), GREEDY)
            again = engine.generate(random_ids(75) + first.token_ids, GREEDY)
            texts.append((first.token_ids, again.token_ids))
    assert texts[0] == texts[1]
    peaks = [rank["device_peak_bytes"] for rank in again.stats["ranks"]]
    budget = again.stats["memory"]["device_budget_bytes"]
    assert max(peaks) <= budget


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "saves", "loads"),
    [("cuda:0", 2, 1), pytest.param("cuda", 1, 2, marks=pytest.mark.gpus(2))],
)
def test_a_context_goes_on_with_another_number(
    tiny, tmp_path, device: str, saves: int, loads: int
) -> None:
    path, _ = tiny("llama")
    options = placed("kv", OPTIONS | {"budget": 32, "draft_tokens": 6}) | {"device": device}
    prompt = random_ids(75)
    with Engine.from_pretrained(path, gpus=saves, **options) as engine:
        engine.generate(prompt, SamplingParams(1))
        engine.save_context(tmp_path / "context")
        expected = engine.generate([*prompt, 5], GREEDY).token_ids
    with Engine.from_pretrained(path, gpus=loads, **options) as engine:
        assert engine.load_context(tmp_path / "context").tokens == len(prompt)
        result = engine.generate([*prompt, 5], GREEDY)
    assert (result.token_ids, result.stats["reused_tokens"]) == (expected, len(prompt))


@pytest.mark.slow
def test_ranks_that_share_a_gpu_need_a_budget(tiny) -> None:
    path, _ = tiny("llama")
    options = {name: value for name, value in OPTIONS.items() if name != "device_memory"}
    with pytest.raises(UsageError, match="--device-memory"):
        Engine.from_pretrained(path, device="cuda:0", gpus=2, **options)
