"""Passes over several texts at once: what streams of the weights crosses once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from offload.conveyor import Conveyor
from offload.copies import start_copies
from offload.kv.sequences import SequenceCaches
from offload.link.trace import Tracer
from offload.passes import Passes
from offload.placement import Placement
from offload.weights import StreamedWeights, WeightStore


class JointPasses:
    """Passes that some texts take part in, others each time if need be.

    For every pass: `begin` with those that take part, a forward over `weights` and `cache` with
    their feeds side by side, then `Passes.keep` of each. A text is read between two of them, after
    `end` if one was begun.
    """

    def __init__(
        self, weights: WeightStore, conveyor: Conveyor, placement: Placement, trace: Tracer
    ) -> None:
        self.weights = StreamedWeights(weights, conveyor, trace)
        self._store = weights
        self._conveyor = conveyor
        self._placement = placement
        self._members: list[Passes] = []

    @property
    def cache(self) -> SequenceCaches:
        return SequenceCaches([passes.cache for passes in self._members])

    def begin(self, members: Sequence[Passes]) -> None:
        """Starts the copies of a pass over everything that these texts keep. The pass before, if
        any, was kept by those that took part, or has been ended.
        """
        self._members = list(members)
        copies = start_copies(
            self._conveyor, self._store, self._placement, [passes.kv for passes in members]
        )
        own = [0] * len(members)
        shared = 0
        for copy in copies:
            if copy.block is None:
                shared += copy.nbytes
            else:
                own[copy.text] += copy.nbytes
        for text, passes in enumerate(members):
            # So that the bytes of all texts together are those that crossed.
            part = shared * (text + 1) // len(members) - shared * text // len(members)
            passes.begun(own[text] + part, text)

    def end(self) -> None:
        """Drops a pass that was begun and not run."""
        self._conveyor.cancel()
        for passes in self._members:
            passes.begun_no_more()
        self._members = []
