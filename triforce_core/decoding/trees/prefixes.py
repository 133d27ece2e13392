"""What rows of logits follow: the tokens of a draft, as a chain or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Prefixes:
    """The tokens behind a text that each row of logits follows.

    tokens: [n] int64, in any order
    paths: for each row, the indices of the tokens that it follows, first to last
    """

    tokens: torch.Tensor
    paths: Sequence[Sequence[int]]

    @classmethod
    def of_chain(cls, tokens: torch.Tensor, rows: int) -> Prefixes:
        """Return those of `rows` rows, of which the last follows all tokens [n], the row before it
        all but the last, and so on. Raises ValueError if there are too few tokens.
        """
        first = len(tokens) - (rows - 1)
        if first < 0:
            raise ValueError(f"{rows} rows cannot follow {len(tokens)} tokens one after another")
        return cls(tokens, [range(first + row) for row in range(rows)])

    @classmethod
    def of_tree(cls, tokens: torch.Tensor, parents: Sequence[int]) -> Prefixes:
        """Return those of a pass over a tree: row 0 follows none of the tokens [n], and row i + 1
        follows token i, which follows row `parents[i]`.
        """
        paths: list[list[int]] = [[]]
        for token, parent in enumerate(parents):
            paths.append([*paths[parent], token])
        return cls(tokens, paths)
