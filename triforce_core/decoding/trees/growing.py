"""Trees as they grow, from the text on: what proposes adds tokens until they are a draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from triforce_core.decoding.acceptance import Draft
from triforce_core.decoding.trees.growth import Growth
from triforce_core.decoding.trees.tree import Branches
from triforce_offload.memory.device import put


class Tree:
    """Tokens by row, of which row 0 is the text's last one. See `Branches`.

    values: of each row, see `Growth`
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values = [1.0]
        self._confidence: list[float] = []
        self._drawn: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self, parent: int, token: int, value: float, sure: float, *, drawn: bool = False
    ) -> int:
        """Adds a child, and gives its row. drawn: whether from a distribution."""
        if drawn:
            self._drawn.append(len(self.tokens))
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(value)
        self._confidence.append(sure)
        return len(self.tokens)

    def draft(self, device: torch.device, probs: Sequence[torch.Tensor] = ()) -> Draft:
        """distributions: of the tokens that were drawn, in their order, [drawn, vocab] in parts"""
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
) -> list[Candidate]:
    """The children of a row that come after its first, as far as they are worth it.

    reached: the chance that the row is reached and its first child does not hold
    rest: how likely the drafter finds all tokens but that
    likely: the others from the likeliest on, and how likely it finds each
    """
    found: list[Candidate] = []
    least = reached
    for rank, (token, own) in enumerate(likely, start=1):
        share = own / rest if rest > own else 1.0
        chance = growth.chance(rank, share)
        # No later child may come before an earlier one.
        least = min(least, reached * chance)
        if least < growth.level_least:
            break
        found.append(Candidate(least, parent, token, share))
        reached *= 1 - chance
        rest -= own
    return found
