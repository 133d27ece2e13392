"""The out-of-memory fallback: another program took the device's memory in the middle of a request,
so this one gives some back and makes the pass again.
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
    """Makes a pass or a prefill that ran out of device memory again, each time with less memory."""

    def __init__(self, models: Models, drafting: Drafting) -> None:
        self._models = models
        self._drafting = drafting

    @property
    def applies(self) -> bool:
        """Whether memory can be given back: no other context and no other rank uses it."""
        return self._models.has_one_context and self._models.ranks.count == 1

    def run(
        self,
        context: Context,
        attempt: Callable[[], _Given],
        kept: int,
        levels_changed: Callable[[], None],
    ) -> _Given:
        """Return what `attempt` returns: the steps of a pass, or a prefill, which leave nothing
        behind but KV when they fail. The output distribution stays what it is.

        kept: tokens whose KV holds before. levels_changed: called when a level was dropped for
            good; decoders created earlier are invalid then
        Raises OutOfDeviceMemoryError when there is nothing to give back.
        """
        failed = False
        while True:
            try:
                if failed:
                    # This takes a little memory too.
                    context.retry_from(kept)
                return attempt()
            except OUT_OF_MEMORY as error:
                why = str(error).splitlines()[0]
            # After the handler: the error refers to whatever the pass had allocated.
            failed = True
            self._models.runtime.passes.end()
            given = self._give_back(context)
            if given is None and (level := self._drafting.give_up(context)):
                given = f"the level {level!r} is dropped"
                levels_changed()
            if given is None:
                raise OutOfDeviceMemoryError(why)
            warnings.warn(
                f"the device ran out of memory ({why}); {given}", RuntimeWarning, stacklevel=2
            )

    def _give_back(self, context: Context) -> str | None:
        """Give back what costs least, and say what; None if only levels are left."""
        runtime, sequence = self._models.runtime, context.sequence
        steps: tuple[tuple[Callable[[], bool], str], ...] = (
            (sequence.release_reclaimed, "KV in reclaimed memory streams"),
            (runtime.give_up_slots, "copies run less far ahead"),
            (lambda: runtime.give_up_resident(sequence), "all KV streams"),
            (context.levels.give_up_recorded, "what drafts is launched kernel by kernel"),
        )
        return next((said for give, said in steps if give()), None)
