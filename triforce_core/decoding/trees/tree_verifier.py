"""The retrieval level, as trees that it grows see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.trees.prefixes import Prefixes


class Evaluated(NamedTuple):
    """The retrieval level's results for some rows.

    probs: distributions of the token after each row, [rows, vocab] float32
    likely: the likeliest tokens after each row, [rows, at most WIDEST] int64, see `Rule.likeliest`
    chances: their chances, likewise, float32
    """

    probs: torch.Tensor
    likely: torch.Tensor
    chances: torch.Tensor


class TreeVerifier(Protocol):
    """The retrieval level over a tree of drafted rows."""

    device: torch.device

    def evaluate(
        self,
        tokens: torch.Tensor,
        parents: Sequence[int],
        rule: Rule,
        positions: torch.Tensor,
        after: Callable[[], Prefixes],
    ) -> Evaluated:
        """Run tokens [n].

        parents: see `DraftLevels.draft`
        rule: how the tokens after the rows are drawn
        positions: [n] int64 of these tokens
        after: returns the tokens behind the text that each row follows, its own included
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keep rows of the last call, in this order, with the rows that they follow."""
