"""Drafting ahead: the distribution of texts, what stays valid after a verdict, and failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from helpers import random_ids
from law_tests import LEAST_P
from oracle import assert_equal_but_for_ties, greedy
from test_hierarchy import engine
from test_retrieval_trees import (
    CPU,
    NODES,
    PARAMS,
    TARGET,
    TOKENS,
    VOCAB,
    Drafter,
    Verifier,
    asked,
    p_of,
)

from triforce_core import SamplingParams
from triforce_core.decoding.acceptance import Coupled, Draft, Optimal, Rule
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import distributions
from triforce_core.decoding.draft_ahead import DraftAhead
from triforce_core.decoding.draft_length import Fixed
from triforce_core.decoding.levels import Round, Tally, propose_draft, verify_draft
from triforce_core.decoding.retrieval_level import RetrievalLevel
from triforce_core.requests import batch
from triforce_offload.errors import LinkError

AHEAD, DEEPEST = 30, 12


def ahead_rounds(
    rule: Rule, tokens: int, fault: Callable[[Draft], Draft] = lambda draft: draft
) -> tuple[list[int], list[Round]]:
    """A text by trees that are continued before each verdict, by up to four forwards.

    fault: changes what the verdict is about
    """
    generator = torch.Generator().manual_seed(5)
    verifier, growth, tally = Verifier(), asked(), Tally()
    one = RetrievalLevel(Drafter(generator), verifier, rule, Fixed(2), Fixed(9), (), tally)
    text, outcomes = Text([0]), []
    while text.committed < tokens:
        made = propose_draft(partial(one.branch, text, growth, NODES, 5), text, CPU)
        for _ in range(len(outcomes) % 5):
            one.grow_ahead(NODES + AHEAD, DEEPEST)
        extended = fault(one.extended(made.draft))
        judged = TARGET[made.fed]
        outcome = verify_draft(made, judged, rule, text, lambda rows: None, 0.0, extended)
        before = one._tree._tree, list(one._tree._ahead)
        kept = one.settle(outcome.ahead)
        if kept:
            _check_what_stays(one, *before, outcome)
        verifier.rows.cut(kept)
        verifier.tokens = [verifier.tokens[row] for row in kept]
        growth.observe(outcome, tree=True)
        text.commit(outcome.tokens)
        outcomes.append(outcome)
    return text.tokens, outcomes


def _check_what_stays(one: RetrievalLevel, old, added: list[int], outcome: Round) -> None:
    """The paths behind the text's new last token, and no others."""

    def paths(tree, top: int) -> set[tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {top: ()}
        for row in range(top + 1, len(tree) + 1):
            if tree.parents[row - 1] in found:
                found[row] = (*found[tree.parents[row - 1]], tree.tokens[row - 1])
        return set(found.values())

    row = added[outcome.ahead]
    assert old.tokens[row - 1] == outcome.tokens[-1]
    assert paths(one._tree._tree, 0) == paths(old, row)


def test_a_text_drafted_ahead_has_the_targets_distribution() -> None:
    rule = Optimal(torch.Generator().manual_seed(6))
    tokens, outcomes = ahead_rounds(rule, 2 * TOKENS)
    assert p_of(tokens) > LEAST_P
    began = [outcome for outcome in outcomes if outcome.ahead is not None]
    assert len(began) > len(outcomes) / 5
    assert {0, 1, 2, 3} <= {outcome.accepted for outcome in began}


def always(draft: Draft) -> Draft:
    """Says of tokens drafted ahead that they were drawn from a flatter distribution."""
    if draft.probs is None:
        return draft
    probs = draft.probs.clone()
    probs[-1:] = probs[-1:] * 0.2
    return draft._replace(probs=probs)


def newer(draft: Draft) -> Draft:
    """Says that tokens were drawn from what a newer cache would say."""
    if draft.probs is None:
        return draft
    newest = distributions(
        torch.randn(VOCAB, generator=torch.Generator().manual_seed(9))[None], PARAMS
    )
    return draft._replace(probs=torch.cat((draft.probs[:-1], newest)))


@pytest.mark.parametrize("fault", [always, newer])
def test_planted_faults_are_found_out(fault: Callable) -> None:
    rule = Optimal(torch.Generator().manual_seed(6))
    tokens, _ = ahead_rounds(rule, 4 * TOKENS, fault)
    assert p_of(tokens) < LEAST_P


def test_a_coupled_text_is_that_of_plain_decoding() -> None:
    rule = Coupled(11)
    plain = [0]
    while len(plain) < 400:
        plain.append(int(rule.draw(TARGET[plain[-1:]], len(plain))[0]))
    tokens, outcomes = ahead_rounds(rule, 400)
    assert tokens[:400] == plain
    assert any(outcome.ahead is not None for outcome in outcomes)


@pytest.mark.parametrize("family", ["llama", "llama-mqa", "olmoe"])
@pytest.mark.parametrize("draft", ["none", "ngram", "{self}"])
def test_greedy_texts_are_those_of_transformers(tiny, family: str, draft: str) -> None:
    path, model = tiny(family)
    prompt = random_ids(38, 6) * 2
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False)
    options = {"draft": draft.format(self=path), "budget": 24, "link_bandwidth": 4e6}
    began = 0
    for kind in ({}, {"accept": "coupled"}, {"draft_kv": "int8"}):
        with engine(path, "kv-in-part", **options, **kind) as ours:
            result = ours.generate(prompt, greedy(60))
            again = ours.generate([*prompt, *result.token_ids[:20]], greedy(40))
        began += result.stats["draft_tokens"]["ahead"]
        assert_equal_but_for_ties(
            model, prompt, result.token_ids, expected[0, len(prompt) :].tolist()
        )
        assert again.token_ids == result.token_ids[20:]
    assert began


def test_off_is_off(tiny) -> None:
    path, _ = tiny("llama")
    with engine(path, draft="none", budget=24, link_bandwidth=4e6, draft_ahead="off") as ours:
        assert not ours.runtime.plan.requirements.ahead_tokens
        stats = ours.generate(random_ids(76, 6), greedy(30)).stats
    assert stats["draft_tokens"]["trees"]
    assert not stats["draft_tokens"]["ahead"]


def test_a_failed_pass_leaves_text_and_engine_whole(tiny) -> None:
    path, _ = tiny("llama")
    prompt = random_ids(76, 6)
    params = SamplingParams(40, temperature=0)
    with engine(path, draft="none", budget=24) as ours:
        expected = ours.generate(prompt, params).token_ids
        real, passes = batch.run_pass, []

        def failing(contexts, asks):
            passes.append(list(contexts[0].text.tokens))
            if len(passes) == 3:
                # The other thread drafts meanwhile.
                time.sleep(0.05)
                raise LinkError("a transfer failed")
            return real(contexts, asks)

        with patch.object(batch, "run_pass", failing), pytest.raises(LinkError):
            ours.generate(prompt, params)
        assert passes[2][: len(passes[1])] == passes[1]
        assert ours.generate(prompt, params).token_ids == expected


def test_what_a_step_raises_is_raised_after_the_pass() -> None:
    ahead, done = DraftAhead(), []

    def failing() -> bool:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), ahead.during(failing):
        done.append(1)
    assert done
    with pytest.raises(KeyError), ahead.during(failing):
        raise KeyError("the pass's own")


def test_the_last_step_has_ended_when_the_block_ends() -> None:
    ahead, running = DraftAhead(), threading.Event()

    def step() -> bool:
        running.set()
        time.sleep(0.01)
        running.clear()
        return True

    with ahead.during(step):
        assert running.wait(10)
    assert not running.is_set()
