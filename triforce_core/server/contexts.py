"""The last few conversations: their KV waits in host memory while another has the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triforce_core.decoding.contexts.snapshot import Snapshot
from triforce_core.engine import Engine
from triforce_offload.errors import DoesNotFitError

# A beginning that is shorter is read again rather than kept or brought back.
_WORTH_KEEPING = 256


class Kept(NamedTuple):
    """What was computed for somebody's text."""

    snapshot: Snapshot
    owner: str

    def shared(self, tokens: Sequence[int], owner: str) -> int:
        """How many tokens of an owner's text it has from the beginning."""
        return _shared(self.snapshot.tokens, tokens) if self.owner == owner else 0


class KeptContexts:
    """Contexts besides the engine's own, the latest last."""

    def __init__(self, engine: Engine, most: int) -> None:
        """most: how many are kept."""
        self._engine = engine
        # Of several sequences each has a context of its own.
        self._most = most if engine.sequences == 1 else 0
        self._kept: list[Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def prepare(self, tokens: Sequence[int], owner: str = "") -> None:
        """Before a request of an owner over `tokens`: brings back the context of the same owner
        that shares most with it, and keeps the one at hand if that would be lost.

        Raises LinkError or DoesNotFitError.
        """
        if not self._most:
            return
        at_hand = self._engine.context_tokens
        here = _shared(at_hand, tokens) if self._engine.context_owner == owner else 0
        best = max(self._kept, key=lambda each: each.shared(tokens, owner), default=None)
        found = best.shared(tokens, owner) if best else 0
        # Of one that begins with all of the prompt, as when an answer is given anew, nothing is
        # lost that could be asked for; of one that it mostly begins with, little.
        brings = best is not None and found >= here + _WORTH_KEEPING
        if brings:
            # First of all, or it might have to make room for the one at hand.
            self._kept.remove(best)
        lost = here < len(at_hand) / 2 and here < len(tokens) - 1
        if len(at_hand) >= _WORTH_KEEPING and lost:
            self._keep(at_hand)
        if brings:
            self._engine.restore(*best)

    def _keep(self, tokens: Sequence[int]) -> None:
        """Copies the context at hand, unless the host has no room for it. One that it goes on from
        is not needed besides.
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
    """How many tokens two texts begin with alike."""
    most = min(len(known), len(tokens))
    return next((i for i in range(most) if known[i] != tokens[i]), most)
