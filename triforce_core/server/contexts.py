"""Recent conversations: their KV stays in host memory while the engine serves another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triforce_core.decoding.contexts.snapshot import Snapshot
from triforce_core.engine import Engine
from triforce_offload.errors import DoesNotFitError

# A shared prefix of fewer tokens is prefilled again: saving or restoring it is not worth the copy.
_WORTH_KEEPING = 256


class Kept(NamedTuple):
    """The saved KV of one context, and the client it belongs to."""

    snapshot: Snapshot
    owner: str

    def shared(self, tokens: Sequence[int], owner: str) -> int:
        """Return the length of the prefix shared with `tokens`; 0 for another owner."""
        return _shared(self.snapshot.tokens, tokens) if self.owner == owner else 0


class KeptContexts:
    """Saved contexts besides the engine's current one, the most recent last."""

    def __init__(self, engine: Engine, most: int) -> None:
        """most: the maximum number of saved contexts"""
        self._engine = engine
        # With several sequences, each sequence already keeps its own context.
        self._most = most if engine.sequences == 1 else 0
        self._kept: list[Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def prepare(self, tokens: Sequence[int], owner: str = "") -> None:
        """Prepare the engine for a request over `tokens`.

        Restore the saved context of this owner that shares the longest prefix, if that is worth it.
        Save the current context first if the request would overwrite too much of it. Raises
        LinkError or DoesNotFitError.
        """
        if not self._most:
            return
        at_hand = self._engine.context_tokens
        here = _shared(at_hand, tokens) if self._engine.context_owner == owner else 0
        best = max(self._kept, key=lambda each: each.shared(tokens, owner), default=None)
        found = best.shared(tokens, owner) if best else 0
        # If the current context starts with the whole prompt, as when an answer is regenerated,
        # overwriting it loses nothing that a client could ask for. If it shares most of its tokens
        # with the prompt, little is lost.
        brings = best is not None and found >= here + _WORTH_KEEPING
        if brings:
            # Remove it first, so that saving the current context does not evict it.
            self._kept.remove(best)
        lost = here < len(at_hand) / 2 and here < len(tokens) - 1
        if len(at_hand) >= _WORTH_KEEPING and lost:
            self._keep(at_hand)
        if brings:
            self._engine.restore(*best)

    def _keep(self, tokens: Sequence[int]) -> None:
        """Save the current context, unless host memory has no room for it.

        Drop the saved contexts that it continues.
        """
        owner = self._engine.context_owner
        self._kept = [
            each
            for each in self._kept
            if 2 * each.shared(tokens, owner) < len(each.snapshot.tokens)
        ]
        try:
            self._kept.append(Kept(self._engine.copy_context(), owner))
        except DoesNotFitError:
            return
        del self._kept[: -self._most]


def _shared(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    most = min(len(known), len(tokens))
    return next((i for i in range(most) if known[i] != tokens[i]), most)
