"""Texts that keep to a grammar, whatever drafts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, make_model, placed

from offload.errors import UsageError
from triforce_core import Engine, SamplingParams
from triforce_core.guiding import Guide, guide_of
from triforce_core.opening import OpenModel

pytest.importorskip("llguidance")

PROMPT = "How many of them are there?"
DIGITS = 'start: /[0-9]{3}-[a-c]{4,12}/ "!"'
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
WAYS = {
    "plain": {"method": "autoregressive"},
    "n-grams": {"method": "speculative", "draft_tokens": 4},
    "retrieval": {"draft": "none", "budget": 32, "draft_tokens": 5},
    "both": {"budget": 32, "draft_tokens": 5, "inner_draft_tokens": 2},
}


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes, and one that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("bytes")
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(directory)
    make_model("llama", directory, vocab_size=len(fast), eos_token_id=fast.eos_token_id)
    return directory


def engine(path: Path, way: str) -> Engine:
    base = {"device": "cpu", "accept": "coupled", "max_context": 200, "block_tokens": BLOCK}
    drafter = {"draft": path} if way == "both" else {}
    return Engine.from_pretrained(path, **placed("kv", base | WAYS[way] | drafter))


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_texts_keep_to_the_grammar_and_are_the_same_whatever_drafts(speaking, temperature) -> None:
    texts = set()
    for way in WAYS:
        with engine(speaking, way) as running:
            params = SamplingParams(60, temperature=temperature, seed=3, grammar=DIGITS)
            result = running.generate(PROMPT, params)
            free = running.generate(PROMPT, SamplingParams(20, temperature=0))
        assert result.finish_reason == "stop", result.text
        assert result.text[:3].isdigit()
        assert result.text[3] == "-"
        assert 4 <= len(result.text[4:-1]) <= 12
        assert set(result.text[4:-1]) <= set("abc")
        assert result.text[-1] == "!"
        assert not free.text[:3].isdigit(), "it would be no test"
        texts.add(result.text)
    assert len(texts) == 1


@pytest.mark.parametrize("seed", range(5))
def test_json_of_a_schema(speaking, seed: int) -> None:
    with engine(speaking, "both") as running:
        schema = {"properties": SCHEMA["properties"] | {"n": {"enum": [1, 22, 333]}}}
        params = SamplingParams(120, temperature=1.0, seed=seed, json_schema=SCHEMA | schema)
        result = running.generate(PROMPT, params)
    if result.finish_reason == "length":
        # White space may go on for ever in a text that is drawn at random.
        pytest.skip("a text that did not end")
    assert set(json.loads(result.text)) == {"n", "ok"}


def test_each_row_has_a_prefix_of_its_own(speaking) -> None:
    with OpenModel.at(speaking) as model:
        tokenizer, config = model.tokenizer, model.checkpoint.config

    def made() -> Guide:
        guide = guide_of(SamplingParams(grammar=DIGITS), tokenizer, config)
        assert guide is not None
        return guide

    ids = tokenizer.encode("12")
    proposed = tokenizer.encode("3-ab")
    guide = made()
    guide.take(ids)
    masks = guide.masks(proposed, 5)
    for row in range(5):
        alone = made()
        alone.take([*ids, *proposed[:row]])
        assert torch.equal(masks[row], alone.masks([], 1)[0])
    # Proposals leave the guide as it was, and behind what may not be anything may.
    assert torch.equal(guide.masks([], 1)[0], masks[0])
    wrong = guide.masks(tokenizer.encode("x1"), 3)
    assert torch.equal(wrong[0], masks[0])
    assert wrong[1:].all()
    assert guide.ended_by(tokenizer.encode("3-abcc!")) == 7
    assert guide.ended_by(tokenizer.encode("3-abcc")) is None


def test_what_is_no_grammar_is_refused(speaking, tiny) -> None:
    with engine(speaking, "plain") as running:
        for name, wrong in (
            ("grammar", "start: ("),
            ("json_schema", "{"),
            ("json_schema", {"type": "nothing"}),
        ):
            with pytest.raises(UsageError, match=f"the {name} cannot be used"):
                running.generate(PROMPT, SamplingParams(9, **{name: wrong}))
        assert running.generate(PROMPT, SamplingParams(2)).stats["new_tokens"] == 2
    with pytest.raises(UsageError, match="one or the other"):
        SamplingParams(grammar=DIGITS, json_schema="{}")
    path, _ = tiny("llama")
    with (
        Engine.from_pretrained(path, device="cpu", max_context=40) as running,
        pytest.raises(UsageError, match="a grammar is of text"),
    ):
        running.generate([1, 2], SamplingParams(9, grammar=DIGITS))
