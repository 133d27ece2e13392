"""Windows and states as the retrieval level uses them: its rows come after the text's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from triforce_offload.kv.recent.stores import RecentStores


class Drafted:
    """The rows of a sequence's recent stores that were drafted since its last pass.

    A pass computes the same rows exactly, in the same place, and the drafted ones are forgotten.

    stores: the stores, in which the rows are
    """

    def __init__(self, stores: RecentStores) -> None:
        self.stores = stores
        self._drafted = 0

    @property
    def windows_end(self) -> int:
        """Index of the row after the last drafted one in the windows; 0 without windows."""
        windows = self.stores.windows
        return windows.end + self._drafted if windows else 0

    @property
    def states_end(self) -> int:
        """Likewise, in the states."""
        states = self.stores.states
        return states.end + self._drafted if states else 0

    def has_room(self, rows: int) -> bool:
        """Whether a forward may write `rows` rows after the drafted ones."""
        return all(each.has_room(self._drafted + rows) for each in self.stores)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep a path of the last forward's rows as drafted ones."""
        for each in self.stores:
            each.move(each.end + self._drafted, rows)
        self._drafted += len(rows)

    def forget(self) -> None:
        """Forget the drafted rows."""
        self._drafted = 0
