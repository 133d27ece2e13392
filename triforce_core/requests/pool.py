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
    def have_room(self) -> bool:
        """Whether another context can be taken."""
        return len(self._taken) < self._most

    def take(self, tokens: Sequence[int], owner: str = "") -> tuple[Context, bool]:
        """Take a context for a prompt. Return it, and whether its KV may be reused, which is not
        the case if it belongs to another owner.

        Takes the free context that shares the longest prefix with the tokens. If that context
        belongs to another conversation, which would lose much of it, takes a new one while there
        may be more, or else the free one that was unused for longest, and copies the context to it
        if a long prefix is shared.

        Raises DoesNotFitError, LinkError or RankError.
        """

        def shared(context: Context) -> int:
            return context.shared(tokens) if self._owners[context] == owner else 0

        free = [each for each in self._all if each not in self._taken]
        best = max(free, key=shared, default=None)
        if best is None:
            best = self._make()
        elif self._loses_much(best, shared(best)):
            copies = is_worth_a_copy(best.length, shared(best))
            best = self._instead_of(best, free, copies=copies)
        self._all = [each for each in self._all if each is not best] + [best]
        self._taken.append(best)
        known = self._owners.get(best, owner) == owner
        self._owners[best], self._prompts[best] = owner, len(tokens)
        return best, known

    def _loses_much(self, context: Context, kept: int) -> bool:
        """Whether a prompt that shares `kept` tokens should not take a context."""
        prompt = self._prompts.get(context, context.length)
        return 2 * kept < context.length or loses_much(context.length, prompt, kept)

    def _instead_of(self, best: Context, free: Sequence[Context], *, copies: bool) -> Context:
        """Return another context than `best`, if there may be one. copies: whether to copy it"""
        other = free[0]
        if len(self._all) < self._most:
            with suppress(DoesNotFitError):
                other = self._make()
        if copies and other is not best:
            try:
                _check_copy(best, 1, all_marks=best.models.ranks.count > 1)
                restore(other, snapshot_of(best))
            except BaseException:
                self._forget(other)
                other.close()
                raise
            self._owners[other] = self._owners[best]
        return other

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
        context = self._to_copy()
        # Earlier marks are in host memory, but the first of several ranks gathers copies of them.
        _check_copy(context, 1, all_marks=context.models.ranks.count > 1)
        return snapshot_of(context)

    def copied(self) -> Snapshot:
        """Return a snapshot of the latest context that is a copy in host memory.

        Raises UsageError, DoesNotFitError if the host lacks memory, LinkError or RankError.
        """
        context = self._to_copy()
        _check_copy(context, context.models.whole_kv.layers, all_marks=True)
        return snapshot_of(context).copied()

    def _to_copy(self) -> Context:
        """Return the latest context. Raises UsageError if there is none."""
        if self.latest is None:
            raise UsageError("there is no context to save: nothing was read yet")
        return self.latest

    def restore(self, saved: Snapshot, owner: str) -> None:
        """Create a context from an owner's snapshot.

        Raises DoesNotFitError, LinkError or RankError.
        """
        (context, _), sound = self.take(saved.tokens, owner), False
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
