"""The contexts of an engine: as many as requests that may be under way at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.snapshot import Snapshot, restore, snapshot_of
from triforce_offload.errors import UsageError
from triforce_offload.memory.host import check_available


class Contexts:
    """Contexts, made when they are first needed. A free one keeps what it has computed: a prompt
    that begins alike prefills only what is new.
    """

    def __init__(self, make: Callable[[], Context], most: int) -> None:
        """make: makes a context. Raises what that raises."""
        self._make = make
        self._most = most
        self._all: list[Context] = []
        self._owners: dict[Context, str] = {}
        self._taken: list[Context] = []

    @property
    def latest(self) -> Context | None:
        """The one that was in use last, if there is one."""
        return self._all[-1] if self._all else None

    @property
    def latest_owner(self) -> str:
        """Whose the latest is."""
        return self._owners[self._all[-1]] if self._all else ""

    @property
    def latest_tokens(self) -> list[int]:
        """Tokens of the latest whose KV is kept."""
        return self.latest.text.tokens[: self.latest.length] if self.latest else []

    @property
    def have_room(self) -> bool:
        """Whether another could be taken."""
        return len(self._taken) < self._most

    def take(self, tokens: Sequence[int], owner: str = "") -> tuple[Context, bool]:
        """The free one that shares most with some tokens; or a new one, as long as there may be
        more, rather than one with which too little would be kept. And whether what it holds may be
        reused: not if it is another owner's. Raises DoesNotFitError.
        """

        def shared(context: Context) -> int:
            return context.shared(tokens) if self._owners[context] == owner else 0

        free = [each for each in self._all if each not in self._taken]
        best = max(free, key=shared, default=None)
        makes = len(self._all) < self._most
        if best is None or (makes and 2 * shared(best) < best.length):
            best = self._make()
        elif 2 * shared(best) < best.length:
            # The one that was in use longest ago.
            best = free[0]
        self._all = [each for each in self._all if each is not best] + [best]
        self._taken.append(best)
        known = self._owners.get(best, owner) == owner
        self._owners[best] = owner
        return best, known

    def give_back(self, context: Context, sound: bool) -> None:
        """A context is free; it is closed if it is of no use any more."""
        self._taken.remove(context)
        if not sound:
            self._all.remove(context)
            del self._owners[context]
            context.close()

    def snapshot(self) -> Snapshot:
        """Return what the latest has computed. Raises UsageError if there is none."""
        if self.latest is None:
            raise UsageError("there is no context to save: nothing was read yet")
        return snapshot_of(self.latest)

    def copied(self) -> Snapshot:
        """Copy what the latest has computed to host memory of its own.

        Raises UsageError, DoesNotFitError if the host has no room, LinkError or RankError.
        """
        saved = self.snapshot()
        shape = self.latest.models.whole_kv
        nbytes = len(saved.tokens) * shape.token_bytes * shape.layers
        check_available(nbytes, "a conversation's KV")
        return saved.copied()

    def restore(self, saved: Snapshot, owner: str) -> None:
        """Make a context of an owner's snapshot. Raises DoesNotFitError, LinkError or RankError."""
        (context, _), sound = self.take(saved.tokens, owner), False
        try:
            restore(context, saved)
            sound = True
        finally:
            self.give_back(context, sound=sound)

    def close(self) -> None:
        """Closes all, in use or not."""
        while self._all:
            self._all.pop().close()
        self._taken.clear()
        self._owners.clear()
