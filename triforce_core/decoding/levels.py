"""Levels: one idea applied twice.

A level proposes tokens with the distributions they were drawn from. A verifier computes its own
distributions for them in one forward and accepts some of them. The retrieval level verifies the
drafter below it, and is thereby a proposer for the full model above it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch

from triforce_core.decoding.acceptance import Draft, Rule
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.trees.growth import Growth
from triforce_core.decoding.trees.tree import Branches
from triforce_core.params import SamplingParams
from triforce_kernels import warmup
from triforce_offload.errors import CheckpointError
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import put


class Proposer(Protocol):
    def propose(self, text: Text, count: int) -> Draft:
        """Propose at most `count` tokens that follow the text. The text is left unchanged."""


class Brancher(Proposer, Protocol):
    def branch(self, text: Text, growth: Growth, nodes: int, deepest: int) -> Draft:
        """Propose a tree of at most `nodes` tokens that follow the text, with no path longer than
        `deepest`. The text is left unchanged.
        """


class Drafter(Protocol):
    """The lowest level: a cheap proposer that keeps state of a sequence between requests."""

    def proposer(self, params: SamplingParams, rule: Rule) -> Proposer:
        """Return a proposer for one request."""

    def roll_back(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of the sequence."""

    def close(self) -> None:
        """Release the drafter's memory."""


class Verifier(Protocol):
    device: torch.device

    def probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run tokens [n], which follow the tokens kept so far. Return the probabilities after each
        token, [n, vocab] float32.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keep a path of the rows of the last forward, and forget the others."""


class Round(NamedTuple):
    """The result of one round of proposing and verifying.

    tokens: the accepted tokens, then the one that the verifier drew itself
    probs: the verifier's distributions of these tokens, [tokens, vocab]; empty for a tree
    peaks: greatest probability of each of these distributions
    path: the verified rows that the tokens follow
    drafted: number of draft tokens
    confidence: the proposer's confidence in each draft token, if it reports that
    branches: how the draft tokens follow one another; None for a chain
    whole: whether the draft was accepted to its end
    warm: whether the times are representative: no kernel was compiled and no graph recorded
    """

    tokens: list[int]
    probs: torch.Tensor
    peaks: list[float]
    path: Sequence[int]
    drafted: int
    confidence: Sequence[float]
    branches: Branches | None
    draft_seconds: float
    verify_seconds: float
    whole: bool
    warm: bool = True

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1

    @property
    def from_siblings(self) -> int:
        """Number of accepted tokens that were no first children of a tree: a chain of the first
        children would have ended at the first of them.
        """
        if self.branches is None:
            return 0
        children = (self.branches.children[row][0] for row in self.path[:-1])
        return sum(row != first for row, first in zip(self.path[1:], children, strict=True))


class Proposed(NamedTuple):
    """A draft on its way to its verifier.

    draft: the draft, with valid token ids
    raw: its tokens as they were proposed, -1 where a probability was not a number
    fed: input of the verifier: the last token of the text, then the draft
    began, seconds: start and duration of proposing
    events: `warmup.events` at the start
    """

    draft: Draft
    raw: torch.Tensor
    fed: torch.Tensor
    began: float
    seconds: float
    events: int


def propose_draft(propose: Callable[[], Draft], text: Text, device: torch.device) -> Proposed:
    """Return a proposer's draft together with the rows that verify it."""
    began, events = time.perf_counter(), warmup.events()
    draft = propose()
    last = put(text.tokens[-1:], device)
    # A damaged drafter proposes -1, which `verify_draft` rejects.
    draft, raw = draft._replace(tokens=draft.tokens.clamp(min=0)), draft.tokens
    fed = torch.cat((last, draft.tokens))
    return Proposed(draft, raw, fed, began, time.perf_counter() - began, events)


def verify_draft(
    made: Proposed,
    probs: torch.Tensor,
    rule: Rule,
    text: Text,
    keep: Callable[[Sequence[int]], None],
    seconds: float,
) -> Round:
    """Apply a rule to a draft, and keep the accepted rows. Waits for the device once.

    probs: the verifier's distributions, [n + 1, vocab]
    keep: Verifier.keep
    seconds: time that the verifier took
    Raises CheckpointError if a level's logits are not finite.
    """
    began = time.perf_counter()
    verdict = rule.accept(made.draft, probs, len(text.tokens))
    # One copy with everything that the host needs; float64 represents token ids exactly.
    answers = (torch.stack((verdict.accepted, verdict.token)), made.raw, probs.amax(-1))
    numbers = come(torch.cat([answer.double() for answer in answers])).tolist()
    last, token, *drafted = map(int, numbers[: -probs.shape[0]])
    check_token(min((token, *drafted)))
    branches, peaks = made.draft.branches, numbers[-probs.shape[0] :]
    path = range(last + 1) if branches is None else branches.path(last)
    keep(path)
    return Round(
        [*(drafted[row - 1] for row in path[1:]), token],
        # The distributions of a tree are not used.
        probs[: last + 1] if branches is None else probs[:0],
        [peaks[row] for row in path],
        path,
        len(drafted),
        made.draft.confidence,
        branches,
        made.seconds,
        seconds + time.perf_counter() - began,
        last == len(drafted) if branches is None else not branches.children[last],
        warmup.events() == made.events,
    )


def speculate(proposer: Proposer, verifier: Verifier, rule: Rule, text: Text, count: int) -> Round:
    """Propose up to `count` tokens and verify them: one forward, one wait for the device.

    Raises CheckpointError if a level's logits are not finite.
    """
    made = propose_draft(partial(proposer.propose, text, count), text, verifier.device)
    began = time.perf_counter()
    probs = verifier.probs(made.fed)
    return verify_draft(made, probs, rule, text, verifier.keep, time.perf_counter() - began)


def check_token(token: int) -> None:
    """Raise CheckpointError for -1, which is drawn from a distribution that contains NaN."""
    if token < 0:
        raise CheckpointError(
            "the model's logits are not finite: its weights are damaged, or they overflow "
            "in this dtype (try --dtype float32)"
        )


class Nothing:
    """A proposer and drafter that proposes nothing: the verifier above draws token by token."""

    def __init__(self, device: torch.device) -> None:
        self._draft = Draft(torch.empty(0, dtype=torch.int64, device=device))

    def propose(self, text: Text, count: int) -> Draft:
        return self._draft

    def proposer(self, params: SamplingParams, rule: Rule) -> Proposer:
        return self

    def roll_back(self, tokens: int) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Tally:
    """Counters of a level's drafts.

    trees: number of rounds whose draft was a tree
    from_siblings: number of accepted tokens that were no first children
    examined: number of draft tokens up to the first rejection, included
    accepted_lengths: number of rounds by the number of draft tokens they accepted
    """

    rounds: int = 0
    trees: int = 0
    from_siblings: int = 0
    drafted: int = 0
    accepted: int = 0
    examined: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accepted_lengths: dict[int, int] = field(default_factory=dict)

    def count(self, outcome: Round) -> None:
        self.rounds += 1
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted
        self.examined += outcome.accepted + (not outcome.whole)
        self.trees += outcome.branches is not None
        self.from_siblings += outcome.from_siblings
        self.draft_seconds += outcome.draft_seconds
        self.verify_seconds += outcome.verify_seconds
        if outcome.drafted:
            lengths = self.accepted_lengths
            lengths[outcome.accepted] = lengths.get(outcome.accepted, 0) + 1

    @property
    def acceptance(self) -> float | None:
        """Share of the examined draft tokens that were accepted; None if none was examined."""
        return self.accepted / self.examined if self.examined else None


class Tallies(NamedTuple):
    """Counters of a request's drafts: those the target verified, those the retrieval level did."""

    target: Tally
    retrieval: Tally
