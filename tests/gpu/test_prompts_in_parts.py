"""Prompts in parts between passes of other requests, on a GPU. Simulated without one."""

from __future__ import annotations

import pytest
from helpers import BLOCK, PLACEMENTS, random_ids
from simulated_gpu import TOKENS

from triforce_core import Completion, Engine, SamplingParams
from triforce_core.decoding.contexts import prefill_parts

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0)


@pytest.mark.parametrize(
    ("family", "placement", "options"),
    [
        ("llama", "kv", {"draft": "none", "budget": 32, "draft_tokens": 5}),
        ("llama", "both", {"method": "speculative", "draft_tokens": 4}),
        ("gemma3", "kv", {"draft": "none", "budget": 32, "draft_tokens": 5}),
        ("qwen3_5", "resident", {"method": "speculative", "draft_tokens": 4}),
    ],
)
def test_texts_are_what_they_are_alone(
    tiny, monkeypatch, family: str, placement: str, options: dict
) -> None:
    monkeypatch.setattr(prefill_parts, "LEAST", 32)
    path, _ = tiny(family)
    prompts = [random_ids(length, length) for length in (20, 150, 70)]
    options |= {"placement": PLACEMENTS[placement], "block_tokens": BLOCK, "dtype": "float32"}
    received: list[list] = [[] for _ in prompts]
    with Engine.from_pretrained(
        path, device="cuda:0", max_context=200, sequences=3, **options
    ) as engine:
        alone = [engine.generate(prompt, GREEDY, reuse=False).token_ids for prompt in prompts]
        engine.forget()
        for prompt, into in zip(prompts, received, strict=True):
            engine.add_request(prompt, GREEDY, into.append)
        while engine.step(in_parts=True):
            pass
    ended = [next(item for item in into if isinstance(item, Completion)) for into in received]
    assert [each.token_ids for each in ended] == alone
