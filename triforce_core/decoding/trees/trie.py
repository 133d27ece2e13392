"""What followed in several places of a text, as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from triforce_core.decoding.trees.growing import Tree
from triforce_core.decoding.trees.growth import Growth

# What speaks for anything else than what followed before.
_ELSE = 4.0
# One long match says more than many short ones.
_POWER = 3


class _Branch(NamedTuple):
    """Places that say the same next token. weight: how much of the text matches there"""

    token: int
    weight: float
    places: list[tuple[int, int]]


class _Next(NamedTuple):
    """The next child that a row may get.

    order: of those that are worth as much, the first
    rank: elder siblings; reached: the chance that the row is and they do not hold
    sure: the child's share of the weight that they leave, which is `rest`
    branches: the child's, and those of younger ones
    """

    minus_value: float
    order: int
    parent: int
    depth: int
    rank: int
    reached: float
    sure: float
    rest: float
    branches: list[_Branch]


def trie(
    tokens: Sequence[int],
    places: Sequence[tuple[int, int]],
    growth: Growth,
    nodes: int,
    deepest: int,
) -> Tree:
    """Of all continuations those of the greatest value, at most `nodes` tokens.

    places: where a text of `tokens` was as it ends now, and for how many tokens. How likely one of
    several continuations is, is told by how much of the text matches where it followed.
    """
    tree, waiting, order = Tree(), [], count()

    def offer(
        parent: int, depth: int, rank: int, reached: float, rest: float, branches: list[_Branch]
    ) -> None:
        if branches and depth < deepest:
            sure = branches[0].weight / rest
            value = reached * growth.chance(rank, sure)
            if value >= growth.least:
                found = (parent, depth, rank, reached, sure, rest, branches)
                heappush(waiting, _Next(-value, next(order), *found))

    def offer_first(parent: int, depth: int, reached: float, places: list[tuple[int, int]]) -> None:
        branches = _branches(tokens, places, depth)
        offer(parent, depth, 0, reached, _ELSE + sum(b.weight for b in branches), branches)

    offer_first(0, 0, 1.0, list(places))
    while waiting and len(tree) < nodes:
        best = heappop(waiting)
        value, branch = -best.minus_value, best.branches[0]
        row = tree.add(best.parent, branch.token, value, best.sure)
        offer_first(row, best.depth + 1, value, branch.places)
        offer(
            best.parent,
            best.depth,
            best.rank + 1,
            best.reached - value,
            best.rest - branch.weight,
            best.branches[1:],
        )
    return tree


def _branches(tokens: Sequence[int], places: list[tuple[int, int]], depth: int) -> list[_Branch]:
    """What follows `depth` tokens after some places, what most speaks for first."""
    found: dict[int, list[tuple[int, int]]] = {}
    for place, length in places:
        at = place + 1 + depth
        if at >= len(tokens):
            # Past the end of what is known a text that repeats goes on with what was proposed.
            period = len(tokens) - 1 - place
            at -= -(-(at + 1 - len(tokens)) // period) * period
        found.setdefault(tokens[at], []).append((place, length))
    branches = [
        _Branch(token, float(sum((length + depth) ** _POWER for _, length in those)), those)
        for token, those in found.items()
    ]
    return sorted(branches, key=lambda branch: -branch.weight)
