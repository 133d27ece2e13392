"""Which tokens a tree takes in, and when a tree is drafted at all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.drafters.ngram import NGramDrafter
from triforce_core.decoding.trees.growing import Tree, younger
from triforce_core.decoding.trees.growth import Growth
from triforce_core.decoding.trees.tree import Branches
from triforce_core.decoding.trees.trie import trie

CPU = torch.device("cpu")


@dataclass
class Outcome:
    """A round, as Growth sees it."""

    branches: Branches | None
    path: tuple[int, ...] = (0,)
    confidence: tuple[float, ...] = ()
    drafted: int = 0
    draft_seconds: float = 0.1
    verify_seconds: float = 1.0
    warm: bool = True

    @property
    def accepted(self) -> int:
        return len(self.path) - 1


def growth(nodes: int = 12, *, asked: bool = True) -> Growth:
    return Growth(nodes, nodes, asked=asked)


def test_what_holds_more_often_than_the_drafter_thinks_is_learned() -> None:
    learned, fork = growth(), Branches((0, 0, 0))
    before = [learned.chance(rank, 0.2) for rank in range(3)]
    for _ in range(300):
        # The second child always.
        learned.observe(Outcome(fork, (0, 2), (0.2, 0.2, 0.2), 3), tree=True)
    assert learned.chance(0, 0.2) < 0.1 * before[0]
    assert learned.chance(1, 0.2) > 0.9
    # The third was never tried.
    assert learned.chance(2, 0.2) == before[2]
    # Other degrees of confidence are others.
    assert learned.chance(0, 0.9) > 0.5


def test_a_tree_is_made_where_it_was_measured_to_be_faster() -> None:
    for tree_seconds, expected in ((2.0, True), (9.0, False)):
        chosen, each = growth(asked=False), []
        for _ in range(200):
            nodes = chosen.choose()
            each.append(nodes > 0)
            if nodes:
                path = (0, 1, 2, 3)
                fork = Branches((0, 1, 2, 0))
                outcome = Outcome(fork, path, (0.5,) * 4, 4, verify_seconds=tree_seconds)
            else:
                outcome = Outcome(None, (0, 1), (), 4, verify_seconds=2.0)
            chosen.observe(outcome, tree=nodes > 0)
        assert not any(each[:4]), "chains first"
        assert (sum(each[20:]) > 150) == expected
        # The other is still tried.
        assert 4 <= each[20:].count(not expected) <= 20


def test_a_further_level_costs_nothing_if_all_are_predicted_at_once() -> None:
    """Though drafts take five times as long as passes."""
    fork, path = Branches((0, 1, 2, 0)), (0, 1, 2, 3)
    for at_once in (False, True):
        learned = Growth(12, 12, asked=False, at_once=at_once)
        for _ in range(50):
            outcome = Outcome(fork, path, (0.5,) * 4, 4, draft_seconds=5.0)
            learned.observe(outcome, tree=True)
        assert learned.is_worth_a_level([0.3]) == at_once


def test_the_first_tree_is_no_larger_than_chains_say_is_worth_it() -> None:
    """Where rows cost nearly as much as passes, as where nothing streams."""
    free, dear = growth(64, asked=False), growth(64, asked=False)
    for each, row in ((free, 0.0), (dear, 0.4)):
        for drafted in (0, 4, 8, 4, 0):
            seconds = 1.0 + row * drafted
            outcome = Outcome(None, (0, 1)[: 1 + drafted], (), drafted, 0.0, seconds)
            each.observe(outcome, tree=False)
    text, places = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], [(4, 3), (9, 2)]
    assert len(trie(text, places, free, 64, 64)) == 64
    assert len(trie(text, places, dear, 64, 64)) < 8


def test_a_kind_is_charged_for_the_rounds_in_which_it_finds_nothing() -> None:
    """Of both the same share; a tree that finds something gives a little more, for much more."""
    chosen, each, generator = growth(asked=False), [], torch.Generator().manual_seed(0)
    for _ in range(400):
        tree = chosen.choose() > 0
        each.append(tree)
        found = bool(torch.rand((), generator=generator) < 0.3)
        path = (0, 1, 2, 3, 4) if found else (0,)
        branches = Branches((0, 1, 2, 3)) if found and tree else None
        seconds = (1.6 if tree else 1.05) if found else 1.0
        outcome = Outcome(branches, path, (0.5,) * 4, 4 * found, 0.0, seconds)
        chosen.observe(outcome, tree=tree)
    assert sum(each[100:]) < 60


def test_rounds_that_compile_kernels_say_nothing_of_time() -> None:
    chosen = growth(asked=False)
    for _ in range(50):
        assert chosen.choose() == 0
        chosen.observe(Outcome(None, (0,), warm=False), tree=False)


def test_tokens_that_cost_more_than_they_are_worth_are_left_out() -> None:
    cheap, dear = growth(asked=False), growth(asked=False)
    for each, seconds in ((cheap, 0.0), (dear, 0.3)):
        for nodes in (4, 8, 12, 8, 4):
            fork = Branches((0,) * nodes)
            seconds_of = {"draft_seconds": 0.0, "verify_seconds": 1.0 + seconds * nodes}
            each.observe(Outcome(fork, (0, 1), (0.5,) * nodes, nodes, **seconds_of), tree=True)
    assert cheap.least < 1e-6
    # .3 s a row, against some 1.7 s a token.
    assert 0.1 < dear.least < 0.3
    places, text = [(4, 3), (9, 2)], [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5]
    sizes = [len(trie(text, places, each, 12, 12)) for each in (cheap, dear)]
    assert sizes[0] == 12
    assert sizes[1] < sizes[0]


def test_the_bar_of_a_level_fills_trees_just_so() -> None:
    one = growth(12)
    start = one.level_least
    for _ in range(20):
        one.grew(3)
    low = one.level_least
    assert low < start
    for _ in range(200):
        one.grew(12)
    assert low < one.level_least <= 0.5


@given(
    st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=12),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.9),
)
def test_younger_siblings_come_in_order_and_are_worth_no_more(
    weights: list[float], reached: float, first: float
) -> None:
    total = sum(weights) * 1.1
    sure = sorted(((1 - first) * weight / total for weight in weights), reverse=True)
    found = younger(growth(), reached, 7, 1 - first, list(enumerate(sure)))
    assert [one.token for one in found] == list(range(len(found)))
    assert all(one.value >= two.value for one, two in pairwise(found))
    assert sum(one.value for one in found) <= reached + 1e-9
    assert all(one.parent == 7 and 0 <= one.sure <= 1 for one in found)


@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=60),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_a_trie_is_of_what_followed(tokens: list[int], nodes: int, deepest: int) -> None:
    drafter, text = NGramDrafter(CPU), Text(tokens)
    draft = drafter.branch(text, growth(nodes), nodes, deepest)
    branches = draft.branches
    if branches is None:
        assert not len(draft.tokens)
        assert not len(drafter.propose(text, 3).tokens)
        return
    drawn = draft.tokens.tolist()
    assert len(drawn) <= nodes
    assert max(branches.depths) <= deepest
    assert draft.probs is None
    assert not branches.drawn
    endings = {
        place for place in range(1, len(tokens) - 1) if tokens[place - 1 : place + 1] == tokens[-2:]
    }
    for row, children in enumerate(branches.children):
        # No token twice among the children of one row.
        said = [drawn[child - 1] for child in children]
        assert len(said) == len(set(said))
        path = [drawn[step - 1] for step in branches.path(row)[1:]]
        # What a branch says followed some earlier place; past the end the text goes round.
        assert any(
            all(token == at(tokens, place, i) for i, token in enumerate(path)) for place in endings
        )


def at(tokens: list[int], place: int, i: int) -> int:
    period = len(tokens) - 1 - place
    return tokens[place + 1 + i % period] if i >= period else tokens[place + 1 + i]


def test_a_trie_prefers_what_more_of_the_text_speaks_for() -> None:
    # "1 2 3" was followed by 4 twice, of which once behind a 9; "2 3" alone by 5.
    tokens = [9, 1, 2, 3, 4, 0, 7, 2, 3, 5, 0, 1, 2, 3, 4, 6, 9, 1, 2, 3]
    draft = NGramDrafter(CPU).branch(Text(tokens), growth(9), 9, 2)
    said = draft.tokens.tolist()
    first, second = draft.branches.children[0]
    assert (said[first - 1], said[second - 1]) == (4, 5)
    assert {said[row - 1] for row in draft.branches.children[first]} == {0, 6}


def test_a_tree_without_tokens_is_a_draft_without_tokens() -> None:
    draft = Tree().draft(CPU)
    assert draft.branches is None
    assert len(draft.tokens) == 0


@pytest.mark.parametrize("nodes", [3, 10, 40])
def test_a_small_models_tree_is_filled_after_a_while(nodes: int) -> None:
    """With the bar that follows how full trees were, whatever the drafter finds likely."""
    one, sizes = growth(nodes), []
    generator = torch.Generator().manual_seed(2)
    for _ in range(150):
        tree, rows = Tree(), [0]
        for _depth in range(8):
            below = len(tree)
            for row in rows:
                likely = (2 * torch.randn(16, generator=generator)).softmax(-1)
                likely = likely.sort(descending=True).values.tolist()
                value = tree.values[row] * one.chance(0, likely[0])
                if value < one.level_least or len(tree) >= nodes:
                    continue
                tree.add(row, 0, value, likely[0])
                rest = list(enumerate(likely))[1:]
                for other in younger(one, tree.values[row] - value, row, 1 - likely[0], rest):
                    if len(tree) < nodes:
                        tree.add(row, other.token, other.value, other.sure)
            rows = [r for r in range(below + 1, len(tree) + 1) if one.may_bear(tree.values[r])]
            if not rows:
                break
        one.grew(len(tree))
        sizes.append(len(tree))
    late = sizes[75:]
    assert sum(late) / len(late) > 0.8 * nodes
