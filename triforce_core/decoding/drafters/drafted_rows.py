"""How the rows that the retrieval level has drafted follow one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class TreeRows(NamedTuple):
    """Rows of a forward that continue a tree.

    positions: [rows] int64, on the host or on the device that computes
    visible: [rows, drafted] bool: which of the last `drafted` keys each row sees, those of the
        drafted rows and of the forward itself. All rows see the keys before these
    lines: `ForwardBatch.lines` on the host, if there are recurrent layers
    """

    positions: torch.Tensor
    visible: torch.Tensor
    lines: torch.Tensor | None = None


class DraftedRows:
    """The rows of a tree that are kept, in the order of their KV."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        # For each row, the rows on its path as bits of a number, itself included.
        self._paths: list[int] = []
        self._next: list[int] = []

    def __len__(self) -> int:
        return len(self._parents)

    def follow(self, count: int, parents: Sequence[int] | None, start: int) -> TreeRows | None:
        """Return how the rows of the next forward follow the kept ones; None if all are a chain.

        parents: for each of the `count` rows, the row that it follows, or -1 if it follows the
            text; its rows are numbered after the kept ones. None for a chain after the last row
        start: position of a row that follows the text

        Raises ValueError.
        """
        held = len(self)
        chain = range(held - 1, held + count - 1)
        self._next = list(chain if parents is None else parents)
        for row, parent in enumerate(self._next):
            if not -1 <= parent < held + row:
                raise ValueError(f"row {held + row} of a draft cannot follow row {parent}")
        if self._next == list(chain) and self._parents == list(range(-1, held - 1)):
            return None
        paths = _paths(self._paths, self._next)[held:]
        drafted = held + count
        size = -(-drafted // 8)
        data = b"".join(path.to_bytes(size, "little") for path in paths)
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        visible = torch.from_numpy(bits.reshape(count, 8 * size)[:, :drafted].astype(np.bool_))
        positions = torch.tensor([start + path.bit_count() - 1 for path in paths])
        return TreeRows(positions, visible)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep rows of the last forward, in this order. Raises ValueError if one follows a row that
        is not kept.
        """
        held = len(self)
        moved = {held + row: held + place for place, row in enumerate(rows)}
        moved |= {row: row for row in range(-1, held)}
        try:
            parents = [moved[self._next[row]] for row in rows]
        except KeyError as error:
            raise ValueError(f"rows {list(rows)} of a draft follow row {error}") from error
        self._paths = _paths(self._paths, parents)
        self._parents += parents
        self._next = []

    def forget(self) -> None:
        """Forget all rows."""
        self._parents, self._paths, self._next = [], [], []


def _paths(known: list[int], parents: Sequence[int]) -> list[int]:
    """Return the paths of the known rows, and of rows after them that follow `parents`."""
    paths = list(known)
    for parent in parents:
        before = paths[parent] if parent >= 0 else 0
        paths.append(before | 1 << len(paths))
    return paths
