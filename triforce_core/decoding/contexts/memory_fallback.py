"""The out-of-memory fallback: if another program takes device memory during a request, release some
memory and repeat the pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.models import Models
from triforce_core.decoding.drafting import Drafting
from triforce_offload.errors import OutOfDeviceMemoryError
from triforce_offload.memory.device import OUT_OF_MEMORY

_Given = TypeVar("_Given")


class MemoryFallback:
    """A runner of passes and prefills that repeats them with less memory if memory runs out."""

    def __init__(self, models: Models, drafting: Drafting) -> None:
        self._models = models
        self._drafting = drafting

    @property
    def applies(self) -> bool:
        """Whether memory can be released: no other context and no other rank uses it."""
        return self._models.has_one_context and self._models.ranks.count == 1

    def run(
        self,
        context: Context,
        attempt: Callable[[], _Given],
        kept: int,
        levels_changed: Callable[[], None],
    ) -> _Given:
        """Return what `attempt` returns, after repeating it with less memory if necessary.

        The output distribution does not change.

        attempt: a pass or a prefill that changes nothing but KV if it fails
        kept: number of tokens whose KV is valid before the attempt
        levels_changed: called when levels were dropped for good; decoders created earlier become
            invalid
        Raises OutOfDeviceMemoryError if no memory is left to release.
        """
        failed = False
        while True:
            try:
                if failed:
                    # Inside the try block, because this takes a little memory too.
                    context.retry_from(kept)
                return attempt()
            except OUT_OF_MEMORY as error:
                why = str(error).splitlines()[0]
            # Outside the handler, because the error keeps the tensors of the pass alive.
            failed = True
            self._models.runtime.passes.end()
            if (effect := self._release(context, levels_changed)) is None:
                raise OutOfDeviceMemoryError(why)
            warnings.warn(
                f"the device ran out of memory ({why}); {effect}", RuntimeWarning, stacklevel=2
            )

    def _release(self, context: Context, levels_changed: Callable[[], None]) -> str | None:
        """Release the memory that costs least to lose, and describe the effect. Return None if
        there is none.
        """
        runtime, sequence = self._models.runtime, context.sequence
        if sequence.release_reclaimed():
            return "KV in reclaimed memory streams"
        if runtime.give_up_resident(sequence):
            return "all KV streams"
        if runtime.give_up_pools():
            return "the CPU computes every expert, and the GPU keeps none"
        small = self._models.small
        drafter = f"the {small.joins.in_words}" if small and small.joins else "the draft model"
        levels = {"retrieval": "the retrieval level"}
        dropped = [levels.get(name, drafter) for name in self._models.held_levels]
        if self._drafting.give_up(context):
            levels_changed()
            return f"{' and '.join(dropped)} {'are' if len(dropped) > 1 else 'is'} dropped"
        return None
