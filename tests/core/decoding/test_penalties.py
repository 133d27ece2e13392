"""Penalties, biases and min_p: transformers' laws, and the same text whatever drafts it."""

from __future__ import annotations

import pytest
import torch
from helpers import BLOCK, placed, random_ids
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import distributions
from triforce_core.decoding.penalties import changed
from triforce_core.decoding.trees.prefixes import Prefixes
from triforce_offload.errors import UsageError

VOCAB = 23
BIASES = ((3, 2.5), (7, -4.0))


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def nothing(rows: int = 1) -> Prefixes:
    """Rows that follow the text."""
    return Prefixes(torch.empty(0, dtype=torch.int64), [()] * rows)


def text(prompt: int = 9, generated: int = 0, seed: int = 1) -> Text:
    made = Text(random_ids(prompt, seed, VOCAB))
    made.commit(random_ids(generated, seed + 1, VOCAB) if generated else [])
    return made


@pytest.mark.parametrize("seed", range(4))
def test_laws_are_transformers(seed: int) -> None:
    said = text(seed=seed)
    params = SamplingParams(
        temperature=0.7, top_p=0.95, min_p=0.08, repeat_penalty=1.3, logit_bias=BIASES
    )
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIASES]),
            TemperatureLogitsWarper(0.7),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.08),
        ]
    )
    row = logits(1, seed)
    expected = theirs(torch.tensor([said.tokens]), row.clone()).softmax(-1)
    found = distributions(row, params, said)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.equal(found > 0, expected > 0)


def test_presence_and_frequency_are_openais() -> None:
    said = text(4)
    said.commit([5, 5, 5, 8])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    found = changed(torch.zeros(1, VOCAB), params, said, nothing())
    expected = torch.zeros(1, VOCAB)
    expected[0, 5], expected[0, 8] = -0.5 - 3 * 0.25, -0.5 - 0.25
    assert torch.equal(found, expected), "of what was generated alone"


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("proposed", [0, 3])
def test_each_row_has_a_prefix_of_its_own(rows: int, proposed: int) -> None:
    """A forward over many rows gives each the law that it would have by itself."""
    params = SamplingParams(
        repeat_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, logit_bias=BIASES
    )
    whole, given = text(6, 5), logits(rows)
    whole.tokens += random_ids(proposed, 5, VOCAB) if proposed else []
    drawn = random_ids(rows - 1, 6, VOCAB) if rows > 1 else []
    before = list(whole.tokens)
    found = changed(
        given, params, whole, Prefixes.of_chain(torch.tensor(drawn, dtype=torch.int64), rows)
    )
    assert whole.tokens == before
    for row in range(rows):
        alone = Text(whole.tokens[:6])
        alone.commit([*whole.tokens[6:], *drawn[:row]])
        assert torch.allclose(
            found[row], changed(given[row : row + 1], params, alone, nothing())[0]
        )


def test_each_row_of_a_tree_follows_its_own_path() -> None:
    params = SamplingParams(repeat_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    parents, whole, given = [0, 0, 1, 3, 2, 3], text(6, 5), logits(7)
    drawn = torch.tensor(random_ids(len(parents), 6, VOCAB))
    found = changed(given, params, whole, Prefixes.of_tree(drawn, parents))
    for row in range(7):
        path, at = [], row
        while at:
            path.insert(0, int(drawn[at - 1]))
            at = parents[at - 1]
        alone = Text(whole.tokens[:6])
        alone.commit([*whole.tokens[6:], *path])
        assert torch.allclose(
            found[row], changed(given[row : row + 1], params, alone, nothing())[0]
        )


def test_a_chain_needs_as_many_tokens_as_its_rows_follow() -> None:
    with pytest.raises(ValueError, match="4 rows cannot follow 2 tokens"):
        Prefixes.of_chain(torch.tensor([1, 2]), 4)


def test_counts_follow_a_text_that_grows() -> None:
    params = SamplingParams(frequency_penalty=1.0, repeat_penalty=1.5)
    growing = text(5)
    for step in range(6):
        growing.commit(random_ids(3, step, VOCAB))
        fresh = Text(growing.tokens[:5])
        fresh.commit(growing.tokens[5:])
        row = logits(1, step)
        of_both = [changed(row, params, each, nothing()) for each in (growing, fresh)]
        assert torch.equal(*of_both)


PARAMS = {
    "penalties": {"repeat_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "biases and min_p": {"logit_bias": {5: 3.0, 6: -2.0}, "min_p": 0.1},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("which", PARAMS)
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_texts_are_the_same_whatever_drafts_them(tiny, which: str, temperature: float) -> None:
    """By each method and level; of a seed that says the text alone. And drafts still hold."""
    path, _ = tiny("llama")
    params = SamplingParams(40, temperature=temperature, seed=4, **PARAMS[which])
    base = {"device": "cpu", "accept": "coupled", "max_context": 160, "block_tokens": BLOCK}
    drafts = {"draft_tokens": 5, "inner_draft_tokens": 2}
    texts, prompt = {}, random_ids(60)
    for name, options in {
        "plain": {"method": "autoregressive"},
        "n-grams": {"method": "speculative", **drafts},
        "model": {"method": "speculative", "draft": path, **drafts},
        "retrieval": {"draft": "none", "budget": 32, **drafts},
        "both": {"draft": path, "budget": 32, **drafts},
        "tree": {"method": "speculative", "draft": path, "tree": 12},
        "tree of n-grams": {"method": "speculative", "draft": "ngram", "tree": 12},
        "tree of the level": {"draft": "none", "budget": 32, "tree": 20},
        "tree of both": {"draft": path, "budget": 32, "tree": 20},
    }.items():
        with Engine.from_pretrained(path, **placed("kv", base | options)) as engine:
            result = engine.generate(prompt, params)
        texts[name] = result.token_ids
        # N-grams may find nothing.
        assert "n-grams" in name or (result.stats["draft_tokens"]["trees"] > 0) == ("tree" in name)
        if name == "model":
            # The same model, the same law.
            assert result.stats["acceptance"]["target"] > 0.99
    assert len({tuple(tokens) for tokens in texts.values()}) == 1, texts
    with Engine.from_pretrained(
        path, **placed("kv", base | {"method": "autoregressive"})
    ) as engine:
        plain = engine.generate(prompt, SamplingParams(40, temperature=temperature, seed=4))
    assert plain.token_ids != texts["plain"], "it would be no test"


def test_what_cannot_be_is_refused(tiny) -> None:
    for name, value in (
        ("min_p", 1.5),
        ("repeat_penalty", 0),
        ("presence_penalty", "x"),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", [(1, float("inf"))]),
        ("logit_bias", [(1,)]),
    ):
        with pytest.raises(UsageError, match=name):
            SamplingParams(**{name: value})
    path, _ = tiny("llama")
    with (
        Engine.from_pretrained(path, device="cpu", max_context=40) as engine,
        pytest.raises(UsageError, match="a token of logit_bias must be 0 to 96, got 97"),
    ):
        engine.generate([1, 2], SamplingParams(logit_bias={97: 1.0}))
