"""Recent conversations: their KV stays in host memory while the engine serves another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triforce_core.decoding.contexts.snapshot import Snapshot
from triforce_core.engine import Engine
from triforce_core.requests.loss import WORTH_COPYING, goes_on, loses_much
from triforce_offload.errors import DoesNotFitError


class Kept(NamedTuple):
    """The saved KV of one context, the client it belongs to, and the length of its last prompt."""

    snapshot: Snapshot
    owner: str
    prompt: int

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
        # Number of tokens of the last prompt.
        self._prompt = 0

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
        brings = best is not None and found >= here + WORTH_COPYING
        if brings:
            # Remove it first, so that saving the current context does not evict it.
            self._kept.remove(best)
        # If the current context starts with the whole prompt, a client went back in it.
        prompt = self._prompt or len(at_hand)
        if here < len(tokens) - 1 and loses_much(len(at_hand), prompt, here):
            self._keep(at_hand, prompt)
        if brings:
            self._engine.restore(best.snapshot, best.owner)
        self._prompt = len(tokens)

    def _keep(self, tokens: Sequence[int], prompt: int) -> None:
        """Save the current context, unless host memory has no room for it.

        Drop the saved contexts that it continues.
        """
        owner = self._engine.context_owner
        self._kept = [
            each for each in self._kept if not goes_on(each.prompt, each.shared(tokens, owner))
        ]
        try:
            self._kept.append(Kept(self._engine.copy_context(), owner, prompt))
        except DoesNotFitError:
            return
        del self._kept[: -self._most]


def _shared(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    most = min(len(known), len(tokens))
    return next((i for i in range(most) if known[i] != tokens[i]), most)
