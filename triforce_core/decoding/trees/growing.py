"""Trees under construction: a proposer adds tokens, then turns the tree into a draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from triforce_core.decoding.acceptance import Draft
from triforce_core.decoding.trees.growth import Growth
from triforce_core.decoding.trees.tree import Branches
from triforce_offload.memory.device import put


class Tree:
    """Tokens by row; row 0 is the text's last token. See `Branches`.

    values: value of each row, see `Growth`
    depths: number of tokens on the path to each row, its own included
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values = [1.0]
        self.depths = [0]
        self._confidence: list[float] = []
        self._drawn: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self, parent: int, token: int, value: float, sure: float, *, drawn: bool = False
    ) -> int:
        """Add a child and return its row. drawn: whether it was drawn from a distribution"""
        if drawn:
            self._drawn.append(len(self.tokens))
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(value)
        self.depths.append(self.depths[parent] + 1)
        self._confidence.append(sure)
        return len(self.tokens)

    def path(self, row: int) -> list[int]:
        """Return the indices of the tokens from the text's end to a row, its own last."""
        path = []
        while row:
            path.append(row - 1)
            row = self.parents[row - 1]
        return path[::-1]

    def ordered(self) -> tuple[Tree, dict[int, int]]:
        """Return the tree with every first child directly after its parent, and the place of each
        of its rows.
        """
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for row in range(len(self), 0, -1):
            children[self.parents[row - 1]].append(row)
        tree, place, waiting, drawn = Tree(), {0: 0}, list(children[0]), set(self._drawn)
        while waiting:
            row = waiting.pop()
            token = row - 1
            place[row] = tree.add(
                place[self.parents[token]],
                self.tokens[token],
                self.values[row],
                self._confidence[token],
                drawn=token in drawn,
            )
            waiting += children[row]
        return tree, place

    def draft(self, device: torch.device, probs: Sequence[torch.Tensor] = ()) -> Draft:
        """Return the draft.

        probs: distributions of the drawn tokens, in their order; parts that together are [drawn,
            vocab]
        """
        tokens = put(self.tokens, device)
        if not self.tokens:
            return Draft(tokens)
        branches = Branches(tuple(self.parents), tuple(self._drawn))
        return Draft(tokens, torch.cat(probs) if probs else None, self._confidence, branches)


class Candidate(NamedTuple):
    """A token that may be added. See `Growth.chance` and its callers."""

    value: float
    parent: int
    token: int
    sure: float


def younger(
    growth: Growth,
    reached: float,
    parent: int,
    rest: float,
    likely: Iterable[tuple[int, float]],
    least_value: float | None = None,
) -> list[Candidate]:
    """Return the children of a row after its first one that are worth a row of a pass.

    reached: probability that the row is accepted and its first child is rejected
    rest: the drafter's probability of all tokens except the first child
    likely: the other tokens with the drafter's probabilities, likeliest first
    least_value: least value that is worth a row; None for that of trees that grow level by level
    """
    found: list[Candidate] = []
    worth = growth.level_least if least_value is None else least_value
    least = reached
    for rank, (token, own) in enumerate(likely, start=1):
        if own <= 0:
            # A grammar forbids it.
            break
        share = own / rest if rest > own else 1.0
        chance = growth.chance(rank, share)
        # Values must not increase, so that no later child comes before an earlier one.
        least = min(least, reached * chance)
        if least < worth:
            break
        found.append(Candidate(least, parent, token, share))
        reached *= 1 - chance
        rest -= own
    return found
