"""Trees that the retrieval level grows, over Markov chains in the place of models: their
distribution, planted faults, and which rows are run and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import patch

import pytest
import torch
from helpers import random_ids
from law_tests import LEAST_P, p_value
from oracle import assert_equal_but_for_ties, greedy
from test_hierarchy import engine
from test_planted_faults import ChainDrafter

from triforce_core import SamplingParams
from triforce_core.decoding.acceptance import Coupled, Draft, Optimal, Rule
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import distributions
from triforce_core.decoding.draft_length import Fixed
from triforce_core.decoding.drafters.drafted_rows import DraftedRows
from triforce_core.decoding.levels import Round, Tally, propose_draft, verify_draft
from triforce_core.decoding.retrieval_level import RetrievalLevel
from triforce_core.decoding.trees import tree
from triforce_core.decoding.trees.growth import Growth, of_retrieval_level
from triforce_core.decoding.trees.prefixes import Prefixes
from triforce_core.decoding.trees.retrieval_tree import WIDEST, RetrievalTree, TreeCosts
from triforce_core.decoding.trees.tree_verifier import Evaluated
from triforce_core.settings import AUTO_TREE_TOKENS

VOCAB, TOKENS, NODES = 8, 6_000, 12
CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0.8, top_p=0.95)
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
MIDDLE = LOGITS + 0.7 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
LOWEST = MIDDLE + 0.7 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
TARGET = distributions(LOGITS, PARAMS)


def drafter(generator: torch.Generator) -> ChainDrafter:
    drawn_from = distributions(LOWEST, PARAMS)
    return ChainDrafter(drawn_from, drawn_from, generator)


class Verifier:
    """A retrieval level whose model knows the last token alone. It checks what rows follow."""

    device = CPU

    def __init__(self, logits: torch.Tensor = MIDDLE) -> None:
        self._logits = logits
        self.tokens: list[int] = []
        self._last: list[int] = []
        self.rows = DraftedRows()
        self.forwards: list[int] = []

    def evaluate(
        self,
        tokens: torch.Tensor,
        parents: Sequence[int],
        rule: Rule,
        positions: torch.Tensor,
        after: Callable[[], Prefixes],
    ) -> Evaluated:
        # Each row follows its path: its own token is the last.
        prefixes = after()
        ends = [prefixes.tokens[path[-1]] for path in prefixes.paths if path]
        assert ends == tokens[len(tokens) - len(ends) :].tolist()
        self.rows.follow(len(tokens), parents, 0)
        self._last = tokens.tolist()
        self.forwards.append(len(tokens))
        logits = self._logits[tokens]
        likely = rule.likeliest(logits, PARAMS, positions, WIDEST)
        return Evaluated(distributions(logits, PARAMS), *likely)

    def keep(self, rows: Sequence[int]) -> None:
        self.rows.keep(rows)
        self.tokens += [self._last[row] for row in rows]


class Level(RetrievalLevel):
    """Forgets what was drafted before each draft, as a refresh does."""

    def branch(self, text: Text, growth: Growth, nodes: int, deepest: int) -> Draft:
        self._verifier.rows.forget()
        self._verifier.tokens.clear()
        return super().branch(text, growth, nodes, deepest)


def level(rule: Rule, generator: torch.Generator, **options: object) -> Level:
    verifier = options.pop("verifier", Verifier())
    return Level(drafter(generator), verifier, rule, Fixed(2), Fixed(9), (), Tally(), **options)


def asked(nodes: int = NODES) -> Growth:
    return Growth(nodes, 5, asked=True, prior=of_retrieval_level, chains=False)


def rounds(
    one: RetrievalLevel, rule: Rule, tokens: int, growth: Growth, target: torch.Tensor = TARGET
) -> tuple[list[int], list[Round]]:
    text, outcomes = Text([0]), []
    while text.committed < tokens:
        propose = partial(one.branch, text, growth, NODES, 5)
        made = propose_draft(propose, text, CPU)
        outcome = verify_draft(made, target[made.fed], rule, text, lambda rows: None, 0.0)
        growth.observe(outcome, tree=True)
        text.commit(outcome.tokens)
        outcomes.append(outcome)
    return text.tokens, outcomes


def p_of(tokens: list[int]) -> float:
    """The p-value of a text's transitions under the target's distribution."""
    pairs = torch.tensor(tokens[:-1]) * VOCAB + torch.tensor(tokens[1:])
    return p_value(pairs.bincount(minlength=VOCAB**2).view(VOCAB, VOCAB), TARGET)


def test_a_text_has_the_targets_distribution() -> None:
    generator = torch.Generator().manual_seed(5)
    rule = Optimal(generator)
    tokens, outcomes = rounds(level(rule, generator), rule, TOKENS, asked())
    assert p_of(tokens) > LEAST_P
    assert {0, 1, 2, 3, 4} <= {outcome.accepted for outcome in outcomes}
    of_siblings = sum(
        outcome.branches.children[parent][0] != row
        for outcome in outcomes
        for parent, row in zip(outcome.path, outcome.path[1:], strict=False)
    )
    assert of_siblings > 50, "siblings are accepted"


class Choosy(RetrievalTree):
    """Replaces an unlikely first child by the likeliest token: the decision depends on the draw."""

    def _bear(self, row, token, probs, likely, chances):
        if probs[0, token] < 0.2 and row in self._drafted and len(self._tree) > 2:
            token = int(probs[0].argmax())
        return super()._bear(row, token, probs, likely, chances)


class Stale(RetrievalTree):
    """Says that tokens were drawn from the distribution of the row before."""

    def _bear(self, row, token, probs, likely, chances):
        before, self._before = getattr(self, "_before", probs), probs
        return super()._bear(row, token, before, likely, chances)


def first_verdict(tokens, branches, draft_probs, target_probs, coins):
    """Tries siblings with the first child's coin, which is known to have rejected it."""
    shared = coins.clone()
    for children in branches.children:
        for child in children[1:]:
            shared[:, child - 1] = coins[:, children[0] - 1]
    return ACCEPT_TREE(tokens, branches, draft_probs, target_probs, shared)


ACCEPT_TREE = tree.accept_tree


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Choosy, Stale, first_verdict])
def test_planted_faults_are_found_out(fault: Callable) -> None:
    generator = torch.Generator().manual_seed(5)
    rule = Optimal(generator)
    if isinstance(fault, type):
        planted = patch("triforce_core.decoding.retrieval_level.RetrievalTree", fault)
    else:
        planted = patch("triforce_core.decoding.acceptance.accept_tree", fault)
    with planted:
        tokens, _ = rounds(level(rule, generator), rule, 4 * TOKENS, asked())
    assert p_of(tokens) < LEAST_P


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_coupled_text_is_that_of_plain_decoding(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    target = distributions(LOGITS, params)
    rule, generator = Coupled(11), torch.Generator().manual_seed(5)
    plain = [0]
    while len(plain) < 300:
        plain.append(int(rule.draw(target[plain[-1:]], len(plain))[0]))
    one = level(rule, generator, sampled=temperature > 0)
    with patch.dict(globals(), {"PARAMS": params}):
        tokens, outcomes = rounds(one, rule, 300, asked(), target)
    assert tokens[:300] == plain
    assert max(outcome.accepted for outcome in outcomes) > 2


def test_rows_are_run_once_and_kept_with_what_they_follow() -> None:
    generator = torch.Generator().manual_seed(5)
    rule, verifier = Optimal(generator), Verifier()
    one = level(rule, generator, verifier=verifier)
    for start in range(VOCAB):
        verifier.forwards.clear()
        draft = one.branch(Text([start]), asked(), NODES, 5)
        branches, tokens = draft.branches, [start, *draft.tokens.tolist()]
        assert len(draft.tokens) == NODES
        assert max(branches.depths) <= 5
        # Each row that has a drawn child was run once, and no other.
        ran = [row for row in range(len(tokens)) if branches.children[row]]
        assert sorted(verifier.tokens) == sorted(tokens[row] for row in ran)
        assert len(branches.drawn) == len(draft.probs) == len(ran)
        assert max(verifier.forwards) > 2, "several paths at once"
        for index, token in enumerate(branches.drawn):
            before = tokens[branches.parents[token]]
            expected = distributions(MIDDLE[before : before + 1], PARAMS)[0]
            torch.testing.assert_close(draft.probs[index], expected)
        # The path of first children comes first.
        spine = [0]
        while branches.children[spine[-1]]:
            spine.append(branches.children[spine[-1]][0])
        assert spine == list(range(len(spine)))


def test_nothing_follows_the_end_of_the_text() -> None:
    generator = torch.Generator().manual_seed(5)
    rule = Optimal(generator)
    one = level(rule, generator)
    one._stops = (1, 2)
    for start in range(VOCAB):
        draft = one.branch(Text([start]), asked(), NODES, 5)
        for row, token in enumerate(draft.tokens.tolist(), start=1):
            assert token not in (1, 2) or not draft.branches.children[row]


class ASecond(TreeCosts):
    """A forward takes a second, whatever the time that it really took."""

    def observe(self, rows: int, seconds: float) -> None:
        super().observe(rows, 1.0)


def test_a_forward_that_is_not_worth_its_time_is_not_run() -> None:
    """A pass that costs no more than a forward of the level is not delayed by one."""
    sizes = []
    for seconds in (0.01, 1e3):
        generator = torch.Generator().manual_seed(5)
        rule = Optimal(generator)
        one = level(rule, generator, costs=ASecond())
        growth = Growth(NODES, 5, asked=False, prior=of_retrieval_level, chains=False)
        for _ in range(40):
            made = propose_draft(partial(one.branch, Text([3]), growth, NODES, 5), Text([3]), CPU)
            outcome = verify_draft(made, TARGET[made.fed], rule, Text([3]), lambda rows: None, 0.0)
            timed = outcome._replace(warm=True, draft_seconds=1.0, verify_seconds=seconds)
            growth.observe(timed, tree=True)
        sizes.append(len(made.draft.tokens))
    assert sizes[0] <= 1
    assert sizes[1] > 6


RUNS = {
    "tree": {"draft": "{self}", "tree": 20},
    "n-grams": {"draft": "ngram", "tree": 40, "draft_kv": "int8"},
    "coupled": {"draft": "none", "tree": 30, "accept": "coupled", "draft_tokens": 8},
    "auto": {"draft": "none", "accept": "coupled"},
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("family", ["llama", "gemma3", "olmoe", "gpt-oss-moe"])
@pytest.mark.parametrize("run", RUNS)
def test_greedy_texts_are_those_of_transformers(tiny, family: str, run: str) -> None:
    path, model = tiny(family)
    prompt = random_ids(38, 6) * 2
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
    options = RUNS[run] | {"budget": 24, "draft": RUNS[run]["draft"].format(self=path)}
    for placement in ("kv", "kv-in-part"):
        with engine(path, placement, **options) as ours:
            result = ours.generate(prompt, greedy(32))
        assert result.stats["draft_tokens"]["trees"]
        assert_equal_but_for_ties(
            model, prompt, result.token_ids, expected[0, len(prompt) :].tolist()
        )


@pytest.mark.parametrize("accept", ["optimal", "coupled"])
def test_auto_drafts_trees_where_they_were_measured_to_gain(tiny, accept: str) -> None:
    path, _ = tiny("llama")
    with engine(path, draft="none", budget=16, accept=accept) as ours:
        needs = ours.runtime.plan.requirements
        trees = ours.generate(random_ids(60, 1), greedy(16)).stats["draft_tokens"]["trees"]
    assert (trees > 0) == (needs.max_draft_tokens == AUTO_TREE_TOKENS) == (accept == "coupled")
