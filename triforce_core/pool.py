"""The contexts of an engine: as many as texts that it may work on at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triforce_core.decoding.context import Context


class Contexts:
    """Contexts, made when they are first needed. One that is free keeps what was computed for its
    text: a prompt that begins alike reads only what is new.
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
        if best is None or (makes and 2 * shared(best) < best.passes.length):
            best = self._make()
        elif 2 * shared(best) < best.passes.length:
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

    def close(self) -> None:
        """Closes all, in use or not."""
        while self._all:
            self._all.pop().close()
        self._taken.clear()
        self._owners.clear()
