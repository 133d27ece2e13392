"""Trees of a small model, over Markov chains in the place of models: their law, planted faults, and
what `auto` makes of what things cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from law_tests import LEAST_P, p_value

from triforce_core.decoding.acceptance import Optimal
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import distributions
from triforce_core.decoding.drafters.model_proposer import ModelProposer
from triforce_core.decoding.levels import propose_draft, verify_draft
from triforce_core.decoding.trees import tree
from triforce_core.decoding.trees.growing import Tree
from triforce_core.decoding.trees.growth import Growth
from triforce_core.params import SamplingParams

VOCAB, TOKENS = 8, 6_000
CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0.6, top_p=0.9)
# What follows each token: of the model, and of what drafts for it.
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
DRAFT = LOGITS + 0.8 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
TARGET = distributions(LOGITS, PARAMS)


class Drafter:
    """A SmallModelDrafter whose model knows the last token alone."""

    device, vocab, most, deepest = CPU, VOCAB, 64, 64

    def __init__(self, logits: torch.Tensor = DRAFT) -> None:
        self.forwards = 0
        self._logits = logits
        self._last = 0

    def catch_up(self, text: Text, count: int) -> torch.Tensor:
        self._last = text.tokens[-1]
        return torch.tensor(text.tokens[-1:])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        self._last = int(tokens[-1])
        return self._logits[self._last : self._last + 1]

    def forward_tree(self, tree: Tree, rows: list[int]) -> torch.Tensor:
        self.forwards += 1
        return self._logits[[tree.tokens[row - 1] for row in rows]]

    def have_drawn(self, tokens: torch.Tensor) -> None:
        pass


def distribution(rule: Optimal, growth: Growth, until: float = 0.0) -> tuple[float, list[int]]:
    """The p-value of a long text's transitions, and how many tokens each draft had that held."""
    proposer, verifying = ModelProposer(Drafter(), PARAMS, rule), rule
    text, accepted, p = Text([0]), [], 1.0
    for looked in range(1_000, TOKENS + 1_000, 1_000):
        while text.committed < min(looked, TOKENS):
            propose = partial(proposer.branch, text, growth, 9, 3)
            made = propose_draft(propose, text, CPU)
            outcome = verify_draft(made, TARGET[made.fed], verifying, text, lambda rows: None, 0.0)
            growth.observe(outcome, tree=True)
            text.commit(outcome.tokens)
            accepted.append(outcome.accepted)
        pairs = torch.tensor(text.tokens[:-1]) * VOCAB + torch.tensor(text.tokens[1:])
        p = p_value(pairs.bincount(minlength=VOCAB**2).view(VOCAB, VOCAB), TARGET)
        if p < until:
            break
    return p, accepted


def asked() -> Growth:
    return Growth(9, 3, asked=True)


def test_a_text_by_trees_has_the_targets_law() -> None:
    p, accepted = distribution(Optimal(torch.Generator().manual_seed(3)), asked())
    assert p > LEAST_P
    assert {0, 1, 2, 3} == set(accepted)


class Sharper(Optimal):
    """Draws from another law than it says."""

    def draw(self, probs: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
        return super().draw(probs**2 / (probs**2).sum(-1, keepdim=True), position)


class Choosy(Optimal):
    """Looks at what was drawn, and draws again what it does not like."""

    def draw(self, probs: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
        one, other = (super(Choosy, self).draw(probs, position) for _ in range(2))
        sure = [probs.gather(1, each[:, None])[:, 0] for each in (one, other)]
        return torch.where(sure[0] >= sure[1], one, other)


@pytest.mark.parametrize("rule", [Sharper, Choosy])
def test_first_children_of_another_law_are_found_out(rule: type[Optimal]) -> None:
    p, _ = distribution(rule(torch.Generator().manual_seed(3)), asked(), until=LEAST_P)
    assert p < LEAST_P


class Rarest(Optimal):
    """Draws the least likely token that a law has, and remembers what it drew."""

    def __init__(self) -> None:
        super().__init__(torch.Generator().manual_seed(3))
        self.drawn: list[int] = []

    def draw(self, probs: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
        rarest = probs.masked_fill(probs == 0, 2.0).argmin(-1)
        self.drawn += rarest.tolist()
        return rarest


def test_every_first_child_that_was_drawn_is_in_the_tree_however_unlikely() -> None:
    """Leaving it out would change the distribution: the decision would depend on the draw."""
    params = SamplingParams(temperature=1.0, top_p=1.0)
    # One token of each row has all but a millionth of the probability.
    logits = 16.0 * torch.eye(VOCAB).roll(1, 0)
    for start in range(VOCAB):
        rule = Rarest()
        draft = ModelProposer(Drafter(logits), params, rule).branch(Text([start]), asked(), 9, 3)
        tokens, branches = draft.tokens.tolist(), draft.branches
        assert rule.drawn
        assert [tokens[index] for index in branches.drawn] == rule.drawn
        # Each is the first child of its row.
        for index in branches.drawn:
            assert branches.children[branches.parents[index]][0] == index + 1


def no_residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p


def test_a_wrong_residual_is_found_out() -> None:
    with patch.object(tree, "residual", no_residual):
        p, _ = distribution(Optimal(torch.Generator().manual_seed(3)), asked(), until=LEAST_P)
    assert p < LEAST_P


def test_children_are_distinct_and_those_that_are_sure_the_likeliest() -> None:
    rule, growth = Optimal(torch.Generator().manual_seed(4)), Growth(30, 4, asked=True)
    proposer, wide = ModelProposer(Drafter(), PARAMS, rule), 0
    for start in range(VOCAB):
        draft = proposer.branch(Text([start]), growth, 30, 4)
        tokens, branches = draft.tokens.tolist(), draft.branches
        assert len(tokens) <= 30
        assert max(branches.depths) <= 4
        assert len(branches.drawn) == len(draft.probs)
        for index, token in enumerate(branches.drawn):
            row = branches.parents[token]
            before = tokens[row - 1] if row else start
            # Each law is that of the place where its token was drawn.
            torch.testing.assert_close(
                draft.probs[index], distributions(DRAFT[before][None], PARAMS)[0]
            )
            assert draft.probs[index, tokens[token]] > 0
        for row, children in enumerate(branches.children):
            said = [tokens[child - 1] for child in children]
            before = tokens[row - 1] if row else start
            order = [
                one for one in DRAFT[before].argsort(descending=True) if one != (said or [0])[0]
            ]
            assert said[1:] == [int(one) for one in order[: max(0, len(said) - 1)]]
            wide += len(said) > 1
    assert wide


def seconds_per_token(
    costs: tuple[float, float, float],
    choose: Callable[[Growth], int],
    growth: Growth,
    sharpness: float,
    rounds: int = 400,
) -> float:
    """costs: seconds of a level or a token of a chain, of a pass, of each of its rows. Of the later
    half of the rounds.
    """
    level, verify, row = costs
    generator = torch.Generator().manual_seed(5)
    rule, target = Optimal(generator), (sharpness * LOGITS).softmax(-1)
    drafter = Drafter(sharpness * DRAFT)
    params = SamplingParams(temperature=1.0, top_p=1.0)
    proposer, text = ModelProposer(drafter, params, rule), Text([0])
    seconds, tokens = 0.0, 0
    for number in range(rounds):
        drafter.forwards, nodes = 0, choose(growth)
        if nodes:
            propose = partial(proposer.branch, text, growth, nodes, growth.deepest)
        else:
            propose = partial(proposer.propose, text, 3)
        made = propose_draft(propose, text, CPU)._replace(seconds=level * drafter.forwards)
        outcome = verify_draft(made, target[made.fed], rule, text, lambda rows: None, 0.0)
        took = verify + row * outcome.drafted
        outcome = outcome._replace(draft_seconds=made.seconds, verify_seconds=took, warm=True)
        growth.observe(outcome, tree=nodes > 0)
        text.commit(outcome.tokens)
        if number >= rounds // 2:
            seconds += took + made.seconds
            tokens += len(outcome.tokens)
    return seconds / tokens


@pytest.mark.one_in(20)
@pytest.mark.parametrize(
    "costs",
    [(0.0, 1.0, 0.0), (0.02, 1.0, 0.001), (0.2, 1.0, 0.0), (0.02, 1.0, 0.1), (1.0, 1.0, 0.1)],
)
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_auto_is_as_fast_as_the_faster_of_trees_and_chains(
    costs: tuple[float, float, float], sharpness: float
) -> None:
    def run(choose: Callable[[Growth], int], *, asked: bool) -> float:
        return seconds_per_token(costs, choose, Growth(16, 16, asked=asked), sharpness)

    chain = run(lambda growth: 0, asked=True)
    trees = run(Growth.choose, asked=True)
    auto = run(Growth.choose, asked=False)
    # Tries of the slower kind, and texts that differ.
    assert auto < 1.12 * min(chain, trees)
