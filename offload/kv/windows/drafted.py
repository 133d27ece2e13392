"""The windows as the retrieval level uses them: its drafted rows come after the text's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.windows.store import WindowStore


class DraftWindows:
    """The windows of a sequence and the rows drafted since its last pass.

    A pass computes the same rows exactly, in the same place, and the drafted ones are forgotten.
    """

    def __init__(self, store: WindowStore) -> None:
        self._store = store
        self._drafted = 0

    @property
    def end(self) -> int:
        """Index of the row after the last drafted one."""
        return self._store.end + self._drafted

    def has_room(self, rows: int) -> bool:
        """Whether a forward may write `rows` rows after the drafted ones."""
        return self._store.has_room(self._drafted + rows)

    def attend(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, end: int | torch.Tensor
    ) -> torch.Tensor:
        """WindowStore.attend."""
        return self._store.attend(layer, qkv, batch, end)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep a path of the last forward's rows as drafted ones."""
        self._store.move(self.end, rows)
        self._drafted += len(rows)

    def forget(self) -> None:
        """Forget the drafted rows."""
        self._drafted = 0
