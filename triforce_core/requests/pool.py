"""The contexts of an engine, one for each request that can run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.snapshot import Snapshot, restore, snapshot_of
from triforce_core.requests.loss import is_worth_a_copy, loses_much
from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.memory.host import check_available


class Contexts:
    """Contexts, created on first use. A free context keeps its KV as a prefix cache: a prompt with
    the same beginning prefills only the rest.
    """

    def __init__(self, make: Callable[[], Context], most: int) -> None:
        """make: creates a context
        most: the most contexts
        """
        self._make = make
        self._most = most
        self._all: list[Context] = []
        self._owners: dict[Context, str] = {}
        # Number of tokens of the last prompt of each.
        self._prompts: dict[Context, int] = {}
        self._taken: list[Context] = []

    @property
    def latest(self) -> Context | None:
        """The context that was used last, or None."""
        return self._all[-1] if self._all else None

    @property
    def latest_owner(self) -> str:
        """Owner of the latest context."""
        return self._owners[self._all[-1]] if self._all else ""

    @property
    def latest_tokens(self) -> list[int]:
        """Tokens of the latest context whose KV is kept."""
        return self.latest.text.tokens[: self.latest.length] if self.latest else []

    @property
    def hold_tokens(self) -> bool:
        """Whether there is a context with KV."""
        return any(context.length for context in self._all)

    @property
    def have_room(self) -> bool:
        """Whether another context can be taken."""
        return len(self._taken) < self._most

    def take(
        self, tokens: Sequence[int], owner: str = "", *, restores: bool = False
    ) -> tuple[Context, bool]:
        """Take a context for a prompt. Return it, and whether its KV may be reused, which is not
        the case if it belongs to another owner.

        Takes the free context that shares the longest prefix with the tokens. If that context
        belongs to another conversation, which would lose much of it, takes a new one while there
        may be more, or else the free one that was unused for longest, and copies the context to it
        if a long prefix is shared.

        restores: whether the context is about to be restored, so that nothing is copied to it
        Raises DoesNotFitError, LinkError or RankError.
        """

        def shared(context: Context) -> int:
            return context.shared(tokens) if self._owners[context] == owner else 0

        free = [each for each in self._all if each not in self._taken]
        best = max(free, key=shared, default=None)
        if best is None:
            best = self._make()
        elif self._loses_much(best, shared(best)):
            other = self._instead_of(free)
            if other is not best and not restores and is_worth_a_copy(best.length, shared(best)):
                self._copy(best, other)
            best = other
        self._all = [each for each in self._all if each is not best] + [best]
        self._taken.append(best)
        known = self._owners.get(best, owner) == owner
        self._owners[best], self._prompts[best] = owner, len(tokens)
        return best, known

    def _loses_much(self, context: Context, kept: int) -> bool:
        """Whether a prompt that shares `kept` tokens should not take a context."""
        prompt = self._prompts.get(context, context.length)
        return 2 * kept < context.length or loses_much(context.length, prompt, kept)

    def _instead_of(self, free: Sequence[Context]) -> Context:
        """Return a new context if there may be more, else the one that was unused for longest."""
        if len(self._all) < self._most:
            with suppress(DoesNotFitError):
                return self._make()
        return free[0]

    def _copy(self, context: Context, to: Context) -> None:
        """Copy a context to another one, unless the host lacks memory for it."""
        try:
            # A rank that restores a context takes no other calls, such as for layers of this one.
            saved = _snapshot(context, copied=context.models.ranks.count > 1)
        except DoesNotFitError:
            return
        try:
            restore(to, saved)
        except BaseException:
            self._forget(to)
            to.close()
            raise
        self._owners[to] = self._owners[context]

    def _forget(self, context: Context) -> None:
        """Remove a context from the pool."""
        self._all = [each for each in self._all if each is not context]
        for about in (self._owners, self._prompts):
            about.pop(context, None)

    def give_back(self, context: Context, sound: bool) -> None:
        """Free a context. It is closed if it is not `sound`."""
        self._taken.remove(context)
        if not sound:
            self._forget(context)
            context.close()

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the latest context. Its layers are copied one at a time, on demand.

        Raises UsageError if there is none, DoesNotFitError if the host lacks memory, or RankError.
        """
        return _snapshot(self._to_copy(), copied=False)

    def copied(self) -> Snapshot:
        """Return a snapshot of the latest context that is a copy in host memory.

        Raises UsageError, DoesNotFitError if the host lacks memory, LinkError or RankError.
        """
        return _snapshot(self._to_copy(), copied=True)

    def _to_copy(self) -> Context:
        """Return the latest context. Raises UsageError if there is none."""
        if self.latest is None:
            raise UsageError("there is no context to save: nothing was read yet")
        return self.latest

    def restore(self, saved: Snapshot, owner: str) -> None:
        """Create a context from an owner's snapshot.

        Raises DoesNotFitError, LinkError or RankError.
        """
        (context, _), sound = self.take(saved.tokens, owner, restores=True), False
        try:
            restore(context, saved)
            sound = True
        finally:
            self.give_back(context, sound=sound)

    def close(self) -> None:
        """Close all contexts, in use or not."""
        while self._all:
            self._all.pop().close()
        self._taken.clear()
        self._owners.clear()
        self._prompts.clear()


def _snapshot(context: Context, *, copied: bool) -> Snapshot:
    """Return a snapshot of a context. copied: whether it owns a copy of all layers

    Raises DoesNotFitError if the host lacks memory, LinkError or RankError.
    """
    # Earlier marks are in host memory, but the first of several ranks gathers copies of them.
    marks = copied or context.models.ranks.count > 1
    _check_copy(context, context.models.whole_kv.layers if copied else 1, all_marks=marks)
    saved = snapshot_of(context)
    return saved.copied() if copied else saved


def _check_copy(context: Context, layers: int, *, all_marks: bool) -> None:
    """Raise DoesNotFitError if the host lacks memory for a copy of a context.

    layers: number of layers whose KV is in memory at once
    all_marks: whether all marks of its recent stores are copied, or only those at its end (an index
        of keys is such a mark)
    """
    models, shape = context.models, context.models.whole_kv
    nbytes = context.length * shape.token_bytes * layers
    for recent, store in zip(models.whole_recent, context.sequence.recent, strict=True):
        lengths = store.saved_lengths if all_marks else [store.length]
        nbytes += sum(map(recent.mark_bytes_at, lengths))
    check_available(nbytes, "a copy of the context in host memory")
