"""L2: the statistics that pass the hierarchy kill every way we know of getting it wrong.

Three levels of Markov chains: a drafter, a middle level and a target, each a table of laws that
depend on the last token. The real levels run over them; then one fault at a time is planted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from law_tests import LEAST_P, p_value

from triforce_core.decoding.acceptance import Draft, Optimal, Verdict, accept
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import draw
from triforce_core.decoding.draft_length import Fixed
from triforce_core.decoding.levels import Nothing, Tally, speculate
from triforce_core.decoding.retrieval_level import RetrievalLevel

VOCAB = 6
# What kills the most stubborn fault; the sound levels pass over as many. Ten times as many:
# scripts/checks long_laws.
TOKENS = 12_000
# Tokens between two looks at whether a fault is dead.
BETWEEN = 2_000
CPU = torch.device("cpu")


def table(seed: int, like: torch.Tensor | None = None) -> torch.Tensor:
    """Laws [last token, next token]; near those of `like` if given."""
    noise = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    if like is None:
        return (1.2 * noise).softmax(-1)
    return (like.log() + 0.7 * noise).softmax(-1)


TARGET = table(1)
MIDDLE = table(2, like=TARGET)
DRAFT = table(3, like=MIDDLE)


@dataclass
class Chain:
    """A level of one table: verifies by it, or draws from it."""

    laws_after: torch.Tensor
    device: torch.device = CPU
    kept: list[int] = field(default_factory=list)

    def probs(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.laws_after[tokens]

    def keep(self, rows: Sequence[int]) -> None:
        self.kept.append(len(rows))


class ChainDrafter:
    """Draws from `drawn` and says that it drew from `said`."""

    def __init__(self, drawn: torch.Tensor, said: torch.Tensor, generator) -> None:
        self._drawn, self._said, self._generator = drawn, said, generator

    def propose(self, text: Text, count: int) -> Draft:
        last, tokens, probs = text.tokens[-1], [], []
        for _ in range(count):
            probs.append(self._said[last])
            last = int(draw(self._drawn[last : last + 1], self._generator))
            tokens.append(last)
        if not tokens:
            return Nothing(CPU).propose(text, 0)
        return Draft(torch.tensor(tokens), torch.stack(probs))


class FaultyRule(Optimal):
    """An Optimal whose acceptance is `fault(tokens, draft_probs, target_probs, generator)`."""

    def __init__(self, generator: torch.Generator, fault: Callable) -> None:
        super().__init__(generator)
        self._coins = generator
        self._fault = fault

    def accept(self, draft: Draft, probs: torch.Tensor, position: int) -> Verdict:
        drawn_from = draft.probs
        if drawn_from is None:
            drawn_from = F.one_hot(draft.tokens, VOCAB).float()
        return self._fault(draft.tokens, drawn_from, probs, self._coins)


def target_for_residual(tokens, draft_probs, target_probs, generator) -> Verdict:
    """The published TriForce rule: a rejected token is replaced by a draw from p itself."""
    accepted = accept(tokens, draft_probs, target_probs, generator).accepted
    return Verdict(accepted, draw(target_probs[accepted].view(1, -1), generator)[0])


def absolute_residual(tokens, draft_probs, target_probs, generator) -> Verdict:
    accepted = accept(tokens, draft_probs, target_probs, generator).accepted
    rest = (target_probs[accepted] - F.pad(draft_probs, (0, 0, 0, 1))[accepted]).abs()
    return Verdict(accepted, draw(rest.view(1, -1), generator)[0])


def stale_bonus(tokens, draft_probs, target_probs, generator) -> Verdict:
    """After a draft that held wholly: the law one position too early."""
    verdict = accept(tokens, draft_probs, target_probs, generator)
    if len(tokens) and verdict.accepted == len(tokens):
        return Verdict(verdict.accepted, draw(target_probs[-2:-1], generator)[0])
    return verdict


class WrongLaw(RetrievalLevel):
    """Hands its tokens up with the drafter's laws in place of its own."""

    def propose(self, text: Text, count: int) -> Draft:
        draft = super().propose(text, count)
        before = [text.tokens[-1], *draft.tokens.tolist()[:-1]]
        return Draft(draft.tokens, DRAFT[before] if len(draft.tokens) else draft.probs)


class TargetLaw(WrongLaw):
    """Hands its tokens up with the target's laws: the ratio is one, everything is accepted."""

    def propose(self, text: Text, count: int) -> Draft:
        draft = RetrievalLevel.propose(self, text, count)
        before = [text.tokens[-1], *draft.tokens.tolist()[:-1]]
        return Draft(draft.tokens, TARGET[before] if len(draft.tokens) else draft.probs)


def run(
    *,
    inner: Callable | None = None,
    outer: Callable | None = None,
    said: torch.Tensor = DRAFT,
    middle: type[RetrievalLevel] = RetrievalLevel,
    lengths: tuple[int, int] = (5, 2),
    tokens: int = TOKENS,
    until: float = 0.0,
    seed: int = 0,
) -> tuple[float, RetrievalLevel, list[int]]:
    """The p-value of a long text's transitions; the middle level; accepted lengths at the top.

    until: a p-value below which the text may end early
    """
    generator = torch.Generator().manual_seed(seed)
    sound = Optimal(generator)
    inner_rule = FaultyRule(generator, inner) if inner else sound
    outer_rule = FaultyRule(generator, outer) if outer else sound
    level = middle(
        ChainDrafter(DRAFT, said, generator),
        Chain(MIDDLE),
        inner_rule,
        Fixed(lengths[1]),
        Fixed(lengths[0]),
        (),
        Tally(),
    )
    text, accepted, p = Text([0]), [], 1.0
    for looked in range(BETWEEN, tokens + BETWEEN, BETWEEN):
        while text.committed < min(looked, tokens):
            outcome = speculate(level, Chain(TARGET), outer_rule, text, lengths[0])
            text.commit(outcome.tokens)
            accepted.append(outcome.accepted)
        pairs = torch.tensor(text.tokens[:-1]) * VOCAB + torch.tensor(text.tokens[1:])
        p = p_value(pairs.bincount(minlength=VOCAB**2).view(VOCAB, VOCAB), TARGET)
        if p < until:
            break
    return p, level, accepted


LENGTHS = {(5, 2): TOKENS, (1, 1): 4_000, (8, 3): 4_000, (4, 8): 4_000}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_hierarchy_has_the_target_law(lengths: tuple[int, int]) -> None:
    p, level, accepted = run(lengths=lengths, tokens=LENGTHS[lengths])
    assert p > LEAST_P
    # None, some and all of a draft accepted, at both levels.
    assert {0, lengths[0]} <= set(accepted)
    assert lengths[0] == 1 or set(accepted) - {0, lengths[0]}
    inner = set(level.tally.accepted_lengths)
    assert {0, min(lengths[1], lengths[0] - 1)} <= inner or lengths[0] == 1


FAULTS = {
    "the published rule at the middle level": {"inner": target_for_residual},
    "the published rule at the target": {"outer": target_for_residual},
    "absolute residual at the middle level": {"inner": absolute_residual},
    "absolute residual at the target": {"outer": absolute_residual},
    "stale bonus at the middle level": {"inner": stale_bonus},
    "stale bonus at the target": {"outer": stale_bonus},
    "another temperature than it says": {"said": DRAFT.pow(2) / DRAFT.pow(2).sum(-1, True)},
    "the drafter's law in the outer ratio": {"middle": WrongLaw},
    "the target's law in the outer ratio": {"middle": TargetLaw},
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_killed(fault: str) -> None:
    p, _, _ = run(**FAULTS[fault], until=LEAST_P)
    assert p < LEAST_P
