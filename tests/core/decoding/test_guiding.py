"""Texts that keep to a grammar, whatever drafts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dflash_files import KINDS, RandomDrafter
from eagle3_heads import Made, RandomHead
from helpers import BLOCK, placed, write_tokens_of_bytes
from transformers import AutoModelForCausalLM

from triforce_core import Engine, SamplingParams
from triforce_core.loading.open_model import OpenModel
from triforce_core.requests.guiding import GrammarLimitError, Guide, guide_of
from triforce_offload.errors import UsageError

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
    # A head that knows few tokens: the grammar may leave none of them.
    "head": {"method": "speculative", "draft_tokens": 4},
    "retrieval, head": {"budget": 32, "draft_tokens": 5, "inner_draft_tokens": 2},
    # Likewise one that knows five candidates for each place.
    "blocks": {"method": "speculative", "draft_tokens": 4},
    "tree, retrieval": {"draft": "none", "budget": 32, "tree": 20},
    "tree, head": {"method": "speculative", "tree": 12},
    "tree, blocks": {"method": "speculative", "tree": 12},
}


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes, and one that ends a text."""
    directory = tmp_path_factory.mktemp("bytes")
    write_tokens_of_bytes(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    RandomHead(model, directory / "head", Made())
    RandomDrafter(model, directory / "blocks", KINDS["second"])
    return directory


def engine(path: Path, way: str) -> Engine:
    base = {"device": "cpu", "accept": "coupled", "max_context": 200, "block_tokens": BLOCK}
    drafters = {"both": path, "head": path / "head", "blocks": path / "blocks"}
    drafters["retrieval, head"] = path / "head"
    name = way.removeprefix("tree, ")
    drafter = {"draft": drafters[name]} if name in drafters else {}
    return Engine.from_pretrained(path, **placed("kv", base | WAYS[way] | drafter))


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_texts_keep_to_the_grammar_and_are_the_same_whatever_drafts(speaking, temperature) -> None:
    texts = set()
    for way in WAYS:
        with engine(speaking, way) as running:
            params = SamplingParams(60, temperature=temperature, seed=3, grammar=DIGITS)
            result = running.generate(PROMPT, params)
            assert (result.stats["draft_tokens"]["trees"] > 0) == ("tree" in way)
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


def masks_of_chain(guide: Guide, tokens: list[int]) -> torch.Tensor:
    return guide.masks([], tokens, [range(row) for row in range(len(tokens) + 1)])


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
    masks = masks_of_chain(guide, proposed)
    for row in range(5):
        alone = made()
        alone.take([*ids, *proposed[:row]])
        assert torch.equal(masks[row], alone.masks([], [], [()])[0])
    # The same behind tokens that all rows follow, and on the branches of a tree.
    assert torch.equal(guide.masks(proposed[:2], proposed[2:], [[], [0], [0, 1]]), masks[2:])
    paths = [[], [0], [0, 1], [2], [2, 1], [0, 1, 3]]
    branches = guide.masks([], tokenizer.encode("3-xa"), paths)
    assert torch.equal(branches[[0, 1, 2, 5]], masks[[0, 1, 2, 3]])
    assert branches[3:5].all()
    # Proposals leave the guide as it was, and behind what may not be anything may.
    assert torch.equal(guide.masks([], [], [()])[0], masks[0])
    wrong = masks_of_chain(guide, tokenizer.encode("x1"))
    assert torch.equal(wrong[0], masks[0])
    assert wrong[1:].all()
    assert guide.ended_by(tokenizer.encode("3-abcc!")) == 7
    assert guide.ended_by(tokenizer.encode("3-abcc")) is None


TOO_MUCH = {"type": "integer", "multipleOf": 999999937, "minimum": 1e15}


@pytest.mark.parametrize("way", ["plain", "both"])
def test_a_schema_beyond_the_packages_limits_is_refused(speaking, way: str) -> None:
    """It is none that is wrong: an empty text would look like an answer."""
    with engine(speaking, way) as running:
        for schema in (TOO_MUCH, {"type": "object", "properties": {"a": TOO_MUCH}}):
            with pytest.raises(GrammarLimitError, match="the json_schema exceeds the limits of"):
                running.generate(PROMPT, SamplingParams(9, json_schema=schema))
        assert running.generate(PROMPT, SamplingParams(2)).stats["new_tokens"] == 2


def test_limits_that_are_met_in_the_middle_of_a_text_are_an_error(speaking) -> None:
    from llguidance import LLMatcher, LLParserLimits

    with OpenModel.at(speaking) as model:
        tokenizer, config = model.tokenizer, model.checkpoint.config
    stops = frozenset(config.eos_token_ids)
    tokens = tokenizer.for_grammars(config.vocab, min(stops))
    grammar = LLMatcher.grammar_from_lark('start: "x" /(a|b)*a(a|b){30}/')

    def made() -> Guide:
        limits = LLParserLimits(max_lexer_states=60)
        return Guide(LLMatcher(tokens, grammar, limits=limits, log_level=0), config.vocab, stops)

    text = tokenizer.encode("x" + "aab" * 40)

    def take_all(guide: Guide) -> None:
        for count in range(len(text)):
            guide.take(text[:count])
            guide.masks([], [], [()])

    for meet in (take_all, lambda guide: masks_of_chain(guide, text)):
        guide = made()
        assert not guide.masks([], [], [()]).all(), "it begins within them"
        with pytest.raises(GrammarLimitError, match="grammar or JSON schema exceeds the limits"):
            meet(guide)


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
    with pytest.raises(UsageError, match="cannot be given together"):
        SamplingParams(grammar=DIGITS, json_schema="{}")
    path, _ = tiny("llama")
    with (
        Engine.from_pretrained(path, device="cpu", max_context=40) as running,
        pytest.raises(UsageError, match="a grammar is of text"),
    ):
        running.generate([1, 2], SamplingParams(9, grammar=DIGITS))
