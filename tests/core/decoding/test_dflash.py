"""DFlash drafters: they compute what their authors publish, follow whatever is accepted and
rejected, and cost no token, however useless.
"""

from __future__ import annotations

import random

import pytest
import torch
from dflash_files import KINDS, Made, RandomDrafter
from drafter_engines import (
    DIRECT,
    FAMILIES,
    RUNS,
    assert_close,
    assert_each_has_its_own,
    assert_saved_goes_on,
    assert_text_of_transformers,
    engine,
    of_latest,
)
from head_walks import grown, walk
from helpers import PLACEMENTS, make_model, random_ids, turns

from triforce_core import Engine
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.text import Text

OF_SECOND = KINDS["second"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_computes_what_its_authors_publish(llama, tmp_path, kind: str) -> None:
    """After prefills of any length, passes that keep some of their rows, and cuts."""
    path, model = llama
    made = RandomDrafter(model, tmp_path / "drafter", KINDS[kind])
    with engine(path, "kv", draft=made.directory, **DIRECT) as ours:
        for drafter, text in walk(ours):
            drafted = random_ids(drafter.deepest, len(text))
            batch = drafter.catch_up(Text(text), 5)
            for place, token in enumerate(drafted):
                assert_close(drafter.forward(batch)[0], made.logits(text, drafted[:place]))
                batch = torch.tensor([token])


@pytest.mark.parametrize("kind", ["first", "second, scaled"])
def test_embeddings_of_gemma_are_scaled_as_the_authors_code_does(tmp_path, kind: str) -> None:
    model = make_model("gemma3", tmp_path / "model")
    made = RandomDrafter(model, tmp_path / "drafter", KINDS[kind])
    with engine(tmp_path / "model", "kv", draft=made.directory, **DIRECT) as ours:
        for drafter, text in walk(ours):
            found = drafter.forward(drafter.catch_up(Text(text), 5))[0]
            assert_close(found, made.logits(text, []), 1e-3)


@pytest.mark.parametrize("kind", ["first", "second"])
def test_rows_of_a_tree_follow_their_path(llama, tmp_path, kind: str) -> None:
    path, model = llama
    made, choose = RandomDrafter(model, tmp_path / "drafter", KINDS[kind]), random.Random(1)
    with engine(path, "kv", draft=made.directory, method="speculative", tree=30) as ours:
        own = Context(ours.models)
        own.prefill(random_ids(50, 2), 60, lambda _: None)
        drafter, text = own.levels.drafter, [*own.text.tokens, 5]
        drafter.forward(drafter.catch_up(Text(text), 20))
        for logits, tokens in grown(drafter, drafter.deepest - 1, choose):
            assert_close(logits, made.logits(text, tokens))
        own.close()


def test_of_a_long_text_it_sees_the_recent_tokens(llama, tmp_path) -> None:
    """As many as its window has, or an eighth fewer, while the text goes on."""
    path, model = llama
    sliding = Made(kinds=("sliding_attention",) * 2, causal=False, window=32)
    made = RandomDrafter(model, tmp_path / "drafter", sliding)
    with engine(path, "kv", draft=made.directory, **DIRECT) as ours:
        for drafter, text in walk(ours):
            found = drafter.forward(drafter.catch_up(Text(text), 5))[0]
            seen = drafter._kv.end
            assert seen <= min(len(text) - 1, 32)
            # The last text is cut, and most of what was known of it with it.
            assert seen >= 28 or len(text) <= 60
            assert_close(found, made.logits(text, [], seen=seen))


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("family", "run", "placement", "kind"),
    [
        (family, run, placement, kind)
        for index, family in enumerate(FAMILIES)
        for run in RUNS
        for kind in ("first", "second")
        for placement in turns(PLACEMENTS, index + len(run), 2)
    ],
)
def test_text_is_that_of_transformers(
    tmp_path, family: str, run: str, placement: str, kind: str
) -> None:
    model = make_model(family, tmp_path / "model")
    made = RandomDrafter(model, tmp_path / "drafter", KINDS[kind])
    with engine(tmp_path / "model", placement, draft=made.directory, **RUNS[run]) as ours:
        assert_text_of_transformers(ours, model, "dflash")


def assert_follows(ours: Engine, made: RandomDrafter, kept: int | None = None) -> None:
    """That the drafter has the states of the latest text, and predicts what follows it.

    kept: number of the tokens that it has; None for all
    """
    drafter, text, found = of_latest(ours)
    seen = len(text) - 1 if kept is None else kept
    assert drafter._kv.end == seen
    assert_close(found, made.logits(text, [], seen=seen))


def test_several_sequences_each_have_their_own_states(llama, tmp_path) -> None:
    path, model = llama
    made = RandomDrafter(model, tmp_path / "drafter", OF_SECOND)
    assert_each_has_its_own(path, made.directory, lambda ours: assert_follows(ours, made))


def test_a_saved_context_goes_on(llama, tmp_path) -> None:
    path, model = llama
    made = RandomDrafter(model, tmp_path / "drafter", OF_SECOND)
    with assert_saved_goes_on(path, made.directory, tmp_path / "saved") as ours:
        # States are not saved: it has those of what was computed since.
        assert_follows(ours, made, ours._contexts.latest.length - 80)
