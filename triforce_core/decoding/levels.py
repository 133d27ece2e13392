"""Levels: one idea applied twice.

A level proposes tokens with the distributions they were drawn from. A verifier computes its own
distributions for them in one forward and accepts some. The retrieval model is a verifier for the
drafter below it and, by that, a proposer for the full model above it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch

from triforce_core.decoding.acceptance import Draft, Rule
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.draft_length import DraftLength
from triforce_core.decoding.trees.growth import Growth
from triforce_core.decoding.trees.tree import Branches
from triforce_core.params import SamplingParams
from triforce_kernels import warmup
from triforce_offload.errors import CheckpointError
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import put


class Proposer(Protocol):
    def propose(self, text: Text, count: int) -> Draft:
        """At most `count` tokens to follow the text. Leaves the text as it was."""


class Brancher(Proposer, Protocol):
    def branch(self, text: Text, growth: Growth, nodes: int, deepest: int) -> Draft:
        """A tree of at most `nodes` tokens to follow the text, no path longer than `deepest`.
        Leaves the text as it was.
        """


class Drafter(Protocol):
    """The lowest level: proposes cheaply, by what it keeps of a text from request to request."""

    def proposer(self, params: SamplingParams, rule: Rule) -> Proposer:
        """Proposes for one request."""

    def roll_back(self, tokens: int) -> None:
        """Only the first `tokens` tokens of the text hold from now on."""

    def give_up_recorded(self) -> bool:
        """Lets go of recorded forwards, and records no more; says whether there were any."""

    def close(self) -> None:
        """Gives its memory back."""


class Verifier(Protocol):
    device: torch.device

    def probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run tokens [n], which follow what was kept so far. Return the probabilities after each,
        [n, vocab] float32.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps a path of the rows just fed and forgets the others."""


class Round(NamedTuple):
    """What one round of proposing and verifying gave.

    tokens: the accepted ones and the one the verifier drew itself. probs: theirs, [tokens, vocab];
        none for a tree
    peaks: the greatest probability of each distribution
    path: rows that were fed, after which they come
    drafted: how many were proposed; confidence: how surely, if the proposer said; branches: how
        they followed one another, if not each the one before it
    whole: whether the tokens end where the draft did
    warm: whether its seconds are those of any such round: no kernel was compiled in it and no graph
        recorded
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


class Proposed(NamedTuple):
    """A draft on its way to its verifier.

    draft: of token ids, whatever was proposed. raw: its tokens as they were proposed, -1 where a
        probability was no number
    fed: what the verifier is fed, the text's last token and the draft
    began, seconds: when proposing began, and how long it took; events: `warmup.events` by then
    """

    draft: Draft
    raw: torch.Tensor
    fed: torch.Tensor
    began: float
    seconds: float
    events: int


def propose_draft(propose: Callable[[], Draft], text: Text, device: torch.device) -> Proposed:
    """Return a proposer's draft, and the rows that verify it."""
    began, events = time.perf_counter(), warmup.events()
    draft = propose()
    last = put(text.tokens[-1:], device)
    # `verify_draft` refuses a damaged drafter's -1.
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
    """Accept what a rule accepts of a draft. Waits for the device once.

    probs: the verifier's, [n + 1, vocab]. keep: Verifier.keep. seconds: that the verifier took
    Raises CheckpointError if a level computes something that is no number.
    """
    began = time.perf_counter()
    verdict = rule.accept(made.draft, probs, len(text.tokens))
    # Everything the host needs in one piece; float64 holds token ids exactly.
    answers = (torch.stack((verdict.accepted, verdict.token)), made.raw, probs.amax(-1))
    numbers = come(torch.cat([answer.double() for answer in answers])).tolist()
    last, token, *drafted = map(int, numbers[: -probs.shape[0]])
    check_token(min((token, *drafted)))
    branches, peaks = made.draft.branches, numbers[-probs.shape[0] :]
    path = range(last + 1) if branches is None else branches.path(last)
    keep(path)
    return Round(
        [*(drafted[row - 1] for row in path[1:]), token],
        # Nobody asks for those of a tree.
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
    """Proposes up to `count` tokens and verifies them: one forward, one wait for the device.

    Raises CheckpointError if a level computes something that is no number.
    """
    made = propose_draft(partial(proposer.propose, text, count), text, verifier.device)
    began = time.perf_counter()
    probs = verifier.probs(made.fed)
    return verify_draft(made, probs, rule, text, verifier.keep, time.perf_counter() - began)


def check_token(token: int) -> None:
    """Raises CheckpointError for what is drawn from a distribution that is not a number."""
    if token < 0:
        raise CheckpointError(
            "the model's logits are not finite: its weights are damaged, or they overflow "
            "in this dtype (try --dtype float32)"
        )


class Nothing:
    """Proposes nothing: the verifier above draws token by token. A drafter too, of no text."""

    def __init__(self, device: torch.device) -> None:
        self._draft = Draft(torch.empty(0, dtype=torch.int64, device=device))

    def propose(self, text: Text, count: int) -> Draft:
        return self._draft

    def proposer(self, params: SamplingParams, rule: Rule) -> Proposer:
        return self

    def roll_back(self, tokens: int) -> None:
        pass

    def give_up_recorded(self) -> bool:
        return False

    def close(self) -> None:
        pass


@dataclass
class Tally:
    """Drafts of a level, counted.

    accepted_lengths: how many rounds accepted 0, 1, 2, ... tokens of their draft
    trees: rounds whose draft branched
    """

    rounds: int = 0
    trees: int = 0
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
        self.draft_seconds += outcome.draft_seconds
        self.verify_seconds += outcome.verify_seconds
        if outcome.drafted:
            lengths = self.accepted_lengths
            lengths[outcome.accepted] = lengths.get(outcome.accepted, 0) + 1

    @property
    def acceptance(self) -> float | None:
        """Accepted tokens of those that were examined, which a rejection ends."""
        return self.accepted / self.examined if self.examined else None


class Tallies(NamedTuple):
    """Of the drafts of a request that the target verified, and the retrieval model."""

    target: Tally
    retrieval: Tally


class RetrievalLevel:
    """Drafts by a verifier: rounds of `speculate` until there are enough tokens, each with the
    verifier's own distribution.
    """

    def __init__(
        self,
        proposer: Proposer,
        verifier: Verifier,
        rule: Rule,
        length: DraftLength,
        length_above: DraftLength,
        stops: Collection[int],
        tally: Tally,
    ) -> None:
        """length: of the proposer's drafts; length_above: of this level's own.

        stops: tokens after which there is nothing to propose. tally: counts the proposer's drafts.
        """
        self.tally = tally
        self._proposer = proposer
        self._verifier = verifier
        self._rule = rule
        self._length = length
        self._length_above = length_above
        self._nothing = Nothing(verifier.device)
        self._stops = stops

    def propose(self, text: Text, count: int) -> Draft:
        if not count:
            return self._nothing.propose(text, count)
        start, probs, confidence = len(text.tokens), [], []
        ended = False
        try:
            while (
                not ended
                and (left := start + count - len(text.tokens))
                and (not confidence or self._length_above.goes_on(confidence))
            ):
                outcome = speculate(
                    self._proposer, self._verifier, self._rule, text, self._length.choose(left - 1)
                )
                self.tally.count(outcome)
                self._length.observe(outcome)
                text.tokens += outcome.tokens
                probs.append(outcome.probs)
                confidence += outcome.peaks
                ended = any(token in self._stops for token in outcome.tokens)
            tokens = text.tokens[start:]
        finally:
            del text.tokens[start:]
        if ended:
            # Nothing follows the end of the text, and stopping at a drawn token biases nothing.
            first = next(i for i, token in enumerate(tokens) if token in self._stops)
            tokens = tokens[: first + 1]
        return Draft(
            put(tokens, self._verifier.device),
            torch.cat(probs)[: len(tokens)],
            confidence[: len(tokens)],
        )
