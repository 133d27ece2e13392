"""DFlash drafters: they compute what their authors publish, follow whatever is accepted and
rejected, and cost no token, however useless.
"""

from __future__ import annotations

import random

import pytest
import torch
from dflash_files import KINDS, Made, RandomDrafter
from drafter_engines import DIRECT, FAMILIES, NEW, RUNS, assert_close, engine
from head_walks import walk
from helpers import PLACEMENTS, make_model, random_ids, turns
from oracle import assert_equal_but_for_ties, greedy

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.trees.growing import Tree

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
        tree, level = Tree(), [0]
        for _ in range(drafter.deepest - 1):
            rows = [
                tree.add(row, choose.randrange(97), 1.0, 1.0)
                for row in level
                for _ in range(choose.randint(1, 2))
            ]
            level = sorted(choose.sample(rows, min(3, len(rows))))
            for row, logits in zip(level, drafter.forward_tree(tree, level), strict=True):
                tokens = []
                while row:
                    tokens.insert(0, tree.tokens[row - 1])
                    row = tree.parents[row - 1]
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
        for tokens in (1, 70):
            prompt = random_ids(tokens, tokens)
            result = ours.generate(prompt, greedy(NEW))
            assert result.stats["levels"][0] == "dflash"
            context = ours._contexts.latest
            assert context.levels.drafter._kv.end == context.length
            theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
            assert_equal_but_for_ties(model, prompt, result.token_ids, theirs[0, tokens:].tolist())


def assert_follows(ours: Engine, made: RandomDrafter, kept: int | None = None) -> None:
    """That the drafter has the states of the latest text, and predicts what follows it.

    kept: number of the tokens that it has; None for all
    """
    context = ours._contexts.latest
    text, drafter = [*context.text.tokens[: context.length], 5], context.levels.drafter
    found = drafter.forward(drafter.catch_up(Text(text), 5))[0]
    seen = context.length if kept is None else kept
    assert drafter._kv.end == seen
    assert_close(found, made.logits(text, [], seen=seen))


def test_several_sequences_each_have_their_own_states(llama, tmp_path) -> None:
    path, model = llama
    made = RandomDrafter(model, tmp_path / "drafter", OF_SECOND)
    prompts = [random_ids(length, length) for length in (5, 40, 90)]
    params = [greedy(20)] * 3
    options = {"draft": made.directory, **DIRECT}
    with engine(path, "kv", sequences=3, **options) as together:
        found = [each.token_ids for each in together.generate_all(prompts, params)]
        assert_follows(together, made)
    with engine(path, "kv", method="autoregressive") as alone:
        assert found == [alone.generate(prompt, greedy(20)).token_ids for prompt in prompts]


def test_a_saved_context_goes_on(llama, tmp_path) -> None:
    path, model = llama
    made = RandomDrafter(model, tmp_path / "drafter", OF_SECOND)
    prompt, params = random_ids(80), SamplingParams(20, temperature=0)
    with engine(path, draft=made.directory) as first:
        first.generate(prompt, SamplingParams(1))
        first.save_context(tmp_path / "saved")
        expected = first.generate([*prompt, 9], params).token_ids
    with engine(path, draft=made.directory) as other:
        assert other.load_context(tmp_path / "saved").tokens == 80
        assert other.generate([*prompt, 9], params).token_ids == expected
        # States are not saved: it has those of what was computed since.
        context = other._contexts.latest
        assert_follows(other, made, context.length - 80)
