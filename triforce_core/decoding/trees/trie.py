"""A tree of the tokens that followed several earlier places in a text."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from triforce_core.decoding.trees.growing import Tree
from triforce_core.decoding.trees.growth import Growth

# Weight of all tokens that did not follow any of the places.
_ELSE = 4.0
# Exponent of a match's length: one long match counts more than many short ones.
_POWER = 3


class _Branch(NamedTuple):
    """The places that are followed by the same token.

    weight: sum over the places of a power of the number of matching tokens
    """

    token: int
    weight: float
    places: list[tuple[int, int]]


class _Next(NamedTuple):
    """The next child that a row may get.

    order: breaks ties between equal values; the first comes first
    rank: number of elder siblings
    reached: probability that the row is accepted and the elder siblings are rejected
    sure: the child's share of `rest`
    rest: weight that the elder siblings leave
    branches: the branches of the child and of its younger siblings
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
    """Return the continuations of the greatest value, at most `nodes` tokens.

    places: earlier places that match the end of `tokens`, each with the number of matching tokens.
        A continuation is the more likely, the more tokens match at its places
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
    """Return the tokens that are `depth` tokens after the places, in order of decreasing weight."""
    found: dict[int, list[tuple[int, int]]] = {}
    for place, length in places:
        at = place + 1 + depth
        if at >= len(tokens):
            # Past the end of the text, a repeating text continues with the proposed tokens.
            period = len(tokens) - 1 - place
            at -= -(-(at + 1 - len(tokens)) // period) * period
        found.setdefault(tokens[at], []).append((place, length))
    branches = [
        _Branch(token, float(sum((length + depth) ** _POWER for _, length in those)), those)
        for token, those in found.items()
    ]
    return sorted(branches, key=lambda branch: -branch.weight)
