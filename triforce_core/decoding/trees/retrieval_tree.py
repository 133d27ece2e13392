"""Trees that the retrieval level grows, some rows at a time."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from math import log
from typing import NamedTuple

import torch

from triforce_core.decoding.acceptance import Draft, Rule
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.draft_length import DraftLength, Line
from triforce_core.decoding.levels import Proposer, Round, Tally
from triforce_core.decoding.trees.growing import Candidate, Tree, younger
from triforce_core.decoding.trees.growth import Growth
from triforce_core.decoding.trees.prefixes import Prefixes
from triforce_core.decoding.trees.tree_verifier import Evaluated, TreeVerifier
from triforce_kernels import warmup
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import put

# Number of likeliest tokens of a row that may become its children.
WIDEST = 5
# Most paths that one forward continues.
_MOST_TIPS = 16
# Before times are known: least value of the likeliest path that is continued.
_UNTIMED_BEST = 0.15
# Tokens that are expected of a path and its branches, over those of the path alone.
_BRANCHES = 1.5
# Steps in which a least value is found by bisection.
_BISECTIONS = 12
# Probability that a path goes on, before a row was run.
_GOES_ON = 0.9


class TreeCosts:
    """Measured seconds of the forwards that grow trees, learned over all requests."""

    def __init__(self) -> None:
        self._seconds = Line()

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a forward over `rows` rows."""
        self._seconds.observe(rows, seconds)

    def of_row(self) -> float:
        """Return the seconds that one more row takes."""
        return self._seconds.slope if self._seconds.known else 0.0

    def of_forward(self, rows: int) -> float:
        """Return the seconds of a forward over `rows` rows."""
        return self._seconds.at(rows) if self._seconds.known else 0.0


class _Run(NamedTuple):
    """What the host knows of a forward's rows behind one tip.

    tip: the row of the tree that was run first
    start: its row in the forward
    proposed: the tokens of the drafter that were run after it
    accepted: how many of them the level accepted
    token: the token that the level drew after these
    likely, chances: of each of the rows, see `Evaluated`
    """

    tip: int
    start: int
    proposed: list[int]
    accepted: int
    token: int
    likely: list[list[int]]
    chances: list[list[float]]

    @property
    def tokens(self) -> list[int]:
        """The tokens that were drawn, one after each row that is kept."""
        return [*self.proposed[: self.accepted], self.token]


class RetrievalTree:
    """A tree under construction, whose first children are drawn by the retrieval level.

    Row 0 is the text's last token. Each forward runs the tips of greatest value: rows that the
    level has not run yet, behind which the drafter may propose more. A row that was run has one
    child that was drawn, and may get the likeliest other tokens as younger ones. Values are those
    of `Growth`, which says what a row and a forward must be worth.
    """

    def __init__(
        self,
        text: Text,
        verifier: TreeVerifier,
        proposer: Proposer,
        rule: Rule,
        growth: Growth,
        costs: TreeCosts,
        length: DraftLength,
        stops: Collection[int],
        tally: Tally,
        *,
        sampled: bool,
    ) -> None:
        """length: length of the proposer's drafts
        stops: tokens after which nothing is proposed
        tally: counters of the proposer's drafts
        sampled: whether the first children are drawn at random, at a temperature above 0
        """
        self._text = text
        self._verifier = verifier
        self._proposer = proposer
        self._rule = rule
        self._growth = growth
        self._costs = costs
        self._length = length
        self._stops = stops
        self._tally = tally
        self._sampled = sampled
        self._tree = Tree()
        # Drafted row, in the order of the KV, of each row of the tree that was run.
        self._drafted: dict[int, int] = {}
        # For each row that was drawn, the distribution that it was drawn from.
        self._drawn_from: dict[int, torch.Tensor] = {}
        # Rows that may be run, and tokens that may be added, by decreasing value.
        self._waiting: list[tuple[float, int, int | Candidate]] = []
        self._order = count()
        # Number of rows that were run, and the sum of the chances of their first children.
        self._ran = 0
        self._chances = 0.0
        self._wait(1.0, 0)

    def grow(self, nodes: int, deepest: int) -> bool:
        """Run one forward if it is worth its time and the tree has room. Return whether it ran.

        nodes: number of tokens of the largest tree
        deepest: number of tokens of the longest path
        """
        tips = self._choose(nodes, deepest)
        if not tips:
            return False
        began, events = time.perf_counter(), warmup.events()
        proposed = self._propose(tips, nodes, deepest)
        drafted = time.perf_counter()
        found, runs = self._run(tips, proposed)
        self._verifier.keep([row for run in runs for row in self._take(run, found.probs)])
        ended, warm = time.perf_counter(), warmup.events() == events
        if warm:
            self._costs.observe(len(found.probs), ended - began)
        run = runs[0]
        outcome = Round(
            run.tokens,
            found.probs[:0],
            [max(each) for each in run.chances[: len(run.tokens)]],
            range(len(run.tokens)),
            len(run.proposed),
            proposed[0].confidence,
            None,
            drafted - began,
            ended - drafted,
            run.accepted == len(run.proposed),
            warm,
        )
        self._tally.count(outcome)
        self._length.observe(outcome)
        return True

    def draft(self, nodes: int) -> Draft:
        """Return the tree, filled with the tokens of the greatest value that wait.

        The path of first children comes first, since only the first rows of a pass count for the
        scores of chunks.
        """
        while self._waiting and len(self._tree) < nodes:
            value, _, item = heappop(self._waiting)
            if isinstance(item, Candidate) and -value >= self._growth.least:
                self._add(item)
        tree, place = self._tree.ordered()
        drawn_from = sorted(self._drawn_from.items(), key=lambda drawn: place[drawn[0]])
        return tree.draft(self._verifier.device, [probs for _, probs in drawn_from])

    def _choose(self, nodes: int, deepest: int) -> list[int]:
        """Return the rows that the next forward runs, those of the greatest value first."""
        tips, values, leaves = [], [], []
        per_token, row_seconds = self._growth.seconds_per_token, self._costs.of_row()
        room = nodes - len(self._tree)
        least = self._full_at(room)
        if per_token is not None:
            least = max(least, row_seconds / per_token / self._growth.bears)
        while self._waiting and len(tips) < _MOST_TIPS:
            value, item = -self._waiting[0][0], self._waiting[0][2]
            # A row that runs gets a child, and a candidate takes room itself.
            takes = 2 if isinstance(item, Candidate) else 1
            if value < least or room < takes:
                break
            heappop(self._waiting)
            if self._is_last(item, deepest):
                leaves.append((value, item))
                continue
            room -= takes
            values.append(value)
            tips.append(item)
        for value, item in leaves:
            if isinstance(item, Candidate):
                self._wait(value, item)
        if not tips or not self._is_worth(values):
            for value, item in zip(values, tips, strict=True):
                self._wait(value, item)
            return []
        return [self._add(item) if isinstance(item, Candidate) else item for item in tips]

    def _full_at(self, room: int) -> float:
        """Return an estimate of the least value that a row needs for its place if only `room` more
        tokens may be added.

        Behind a row of value v, one path has log(least / v) / log(a) tokens above a least value if
        the tokens of a path are accepted with probability a. Its branches take half as many.
        """
        values = [-value for value, _, _ in self._waiting]
        log_accepted = log(self._chances / self._ran) if self._ran else log(_GOES_ON)
        lowest, highest = 1e-4, 1.0
        for _ in range(_BISECTIONS):
            least = (lowest * highest) ** 0.5
            tokens = sum(log(least / value) for value in values if value > least) / log_accepted
            if _BRANCHES * tokens > room:
                lowest = least
            else:
                highest = least
        return highest

    def _is_worth(self, values: Sequence[float]) -> bool:
        """Whether a forward over rows of these values gains more time than it takes."""
        per_token = self._growth.seconds_per_token
        if per_token is None:
            return values[0] >= _UNTIMED_BEST
        gain = sum(values) * self._growth.bears * per_token
        return gain > self._costs.of_forward(len(values))

    def _propose(self, tips: Sequence[int], nodes: int, deepest: int) -> list[Draft]:
        """Return a draft for each of the rows to run: the drafter's for the first of them, none for
        the others.
        """
        text, start = self._text, len(self._text.tokens)
        # Each row that runs gets one child at least.
        room = nodes - len(self._tree) - len(tips)
        most = max(0, min(room, deepest - self._tree.depths[tips[0]] - 1))
        nothing = Draft(put([], self._verifier.device))
        try:
            text.tokens += [self._tree.tokens[place] for place in self._tree.path(tips[0])]
            first = self._proposer.propose(text, self._length.choose(most))
        finally:
            del text.tokens[start:]
        return [first, *(nothing for _ in tips[1:])]

    def _run(self, tips: Sequence[int], proposed: Sequence[Draft]) -> tuple[Evaluated, list[_Run]]:
        """Run rows, each with the tokens proposed after it. Waits for the device once."""
        device, held = self._verifier.device, len(self._drafted)
        fed, parents, places, starts, paths = [], [], [], [], []
        for tip, draft in zip(tips, proposed, strict=True):
            start, steps = len(parents), len(draft.tokens)
            starts.append(start)
            # Indices among the tree's tokens and then this forward's, of which the tip is one too.
            later = range(len(self._tree) + start + 1, len(self._tree) + start + 1 + steps)
            paths += [[*self._tree.path(tip), *later[:step]] for step in range(steps + 1)]
            here = held + start
            before = self._drafted[self._tree.parents[tip - 1]] if tip else -1
            parents += [before, *range(here, here + steps)]
            places += range(self._place_after(tip), self._place_after(tip) + steps + 1)
            fed += [put([self._token(tip)], device), draft.tokens.clamp(min=0)]
        rows = torch.cat(fed)
        found = self._verifier.evaluate(
            rows,
            parents,
            self._rule,
            put(places, device),
            lambda: Prefixes(torch.cat((put(self._tree.tokens, device), rows)), paths),
        )
        ends = [*starts[1:], len(parents)]
        verdicts = [
            self._rule.accept(draft, found.probs[start:end], self._place_after(tip))
            for tip, draft, start, end in zip(tips, proposed, starts, ends, strict=True)
        ]
        # One copy with everything that the host needs; float64 represents token ids exactly.
        answers = [torch.stack((each.accepted, each.token)) for each in verdicts]
        answers += [draft.tokens for draft in proposed]
        answers += [found.likely.flatten(), found.chances.flatten()]
        numbers = iter(come(torch.cat([answer.double() for answer in answers])).tolist())
        decided = [(int(next(numbers)), int(next(numbers))) for _ in tips]
        tokens = [[int(next(numbers)) for _ in draft.tokens] for draft in proposed]
        likely = _rows(numbers, len(parents), found.likely.shape[1])
        chances = _rows(numbers, len(parents), found.likely.shape[1])
        runs = []
        for index, (tip, start, end) in enumerate(zip(tips, starts, ends, strict=True)):
            of_rows = [list(map(int, row)) for row in likely[start:end]], chances[start:end]
            runs.append(_Run(tip, start, tokens[index], *decided[index], *of_rows))
        return found, runs

    def _take(self, run: _Run, probs: torch.Tensor) -> list[int]:
        """Add the tokens that were drawn behind a tip. Return the rows of the forward to keep.

        probs: of all rows of the forward
        """
        row, rows, first = run.tip, [], len(self._drafted)
        for step, token in enumerate(run.tokens):
            self._drafted[row] = first + step
            at = run.start + step
            rows.append(at)
            row = self._bear(row, token, probs[at : at + 1], run.likely[step], run.chances[step])
            if token in self._stops:
                # Stopping at a token that was drawn adds no bias.
                break
        # The rows before it were run.
        self._wait(self._tree.values[row], row)
        return rows

    def _bear(
        self,
        row: int,
        token: int,
        probs: torch.Tensor,
        likely: Sequence[int],
        chances: Sequence[float],
    ) -> int:
        """Add the child that was drawn for a row that was run. Return the child's row.

        likely, chances: the row's likeliest next tokens, and their probabilities
        """
        growth, value = self._growth, self._tree.values[row]
        chance = growth.chance(0, chances[0])
        self._ran += 1
        self._chances += chance
        own = value * chance
        child = self._tree.add(row, token, own, chances[0], drawn=self._sampled)
        if self._sampled:
            self._drawn_from[child] = probs
        pairs = [pair for pair in zip(likely, chances, strict=True) if pair[0] != token]
        rest = 1 - dict(zip(likely, chances, strict=True)).get(token, 0.0)
        for candidate in younger(growth, value - own, row, rest, pairs, growth.least):
            # No younger child comes before the first.
            least = min(candidate.value, own)
            self._wait(least, candidate._replace(value=least))
        return child

    def _add(self, candidate: Candidate) -> int:
        return self._tree.add(candidate.parent, candidate.token, candidate.value, candidate.sure)

    def _wait(self, value: float, item: int | Candidate) -> None:
        # Of equal values the earlier one comes first: an elder sibling, a parent.
        heappush(self._waiting, (-value, next(self._order), item))

    def _is_last(self, item: int | Candidate, deepest: int) -> bool:
        """Whether nothing may follow a row or candidate: it is deep enough, or ends the text."""
        if isinstance(item, Candidate):
            depth, token = self._tree.depths[item.parent] + 1, item.token
        else:
            depth, token = self._tree.depths[item], self._token(item)
        return depth >= deepest or (depth > 0 and token in self._stops)

    def _place_after(self, row: int) -> int:
        """Return the position in the text of the token after a row."""
        return len(self._text.tokens) + self._tree.depths[row]

    def _token(self, row: int) -> int:
        return self._tree.tokens[row - 1] if row else self._text.tokens[-1]


def _rows(numbers: Iterator[float], rows: int, width: int) -> list[list[float]]:
    return [[next(numbers) for _ in range(width)] for _ in range(rows)]
