"""The real model: SmolLM2-135M equals transformers token for token, wherever it lives."""

from __future__ import annotations

import pytest
import torch

from bench.material import manual, model_file
from triforce_core import Engine, SamplingParams
from triforce_core.model.tokenizing.tokenizer import load_tokenizer
from triforce_offload.plan.placement import Placement

ALL = tuple(range(30))
PLACEMENTS = {
    "resident": Placement((), True, 10**6, 0, 0, 0),
    "kv": Placement((), True, 0, 0, 3, 2),
    "weights": Placement(ALL, True, 10**6, 2, 0, 0),
    "both": Placement(ALL, True, 0, 2, 3, 2),
}
NEW = 40
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(model_file())


@pytest.fixture(scope="module")
def prompt(tokenizer) -> list[int]:
    text = manual(4000) + "\n\nWhat does the `with` statement do?"
    token_ids = tokenizer.chat(text)
    assert len(token_ids) > 900
    return token_ids


@pytest.fixture(scope="module")
def theirs(prompt) -> list[int]:
    from transformers import AutoModelForCausalLM

    path = model_file()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_the_chat_template_is_that_of_transformers(tokenizer) -> None:
    from transformers import AutoTokenizer

    path = model_file()
    twin = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    message = [{"role": "user", "content": "Hi ☕"}]
    expected = twin.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert tokenizer.chat("Hi ☕") == expected
    # Texts of all kinds, both ways, though it is read another way.
    text = manual(60_000) + "  <|im_start|>user e\u0301 \U0001f600 日本語 \n\n\t 123456 "
    token_ids = twin(text)["input_ids"]
    assert tokenizer.encode(text) == token_ids
    assert tokenizer.decode(token_ids) == twin.decode(token_ids, skip_special_tokens=True)
    assert tokenizer.vocabulary == twin.get_vocab()


@pytest.mark.slow
def test_greedy_equals_transformers_wherever_it_lives(prompt, theirs, tokenizer) -> None:
    for placement in PLACEMENTS:
        check(prompt, theirs, tokenizer, placement)


def check(prompt: list[int], theirs: list[int], tokenizer, placement: str) -> None:
    with Engine.from_pretrained(
        model_file(),
        device="cpu",
        max_context=len(prompt) + NEW,
        placement=PLACEMENTS[placement],
        tokenizer=tokenizer,
    ) as engine:
        result = engine.generate(prompt, SamplingParams(max_new_tokens=NEW, temperature=0))
    # transformers is kept from ending early, ours may end: equal up to there.
    assert result.token_ids == theirs[: len(result.token_ids)], placement
    assert len(result.token_ids) > 10
    memory = result.stats["memory"]
    assert memory["device_peak_bytes"] <= memory["device_budget_bytes"]
    assert result.text == tokenizer.decode(result.token_ids)
