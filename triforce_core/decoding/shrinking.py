"""A device that runs out of memory in the middle of a request, since another program took it: what
can be done without is given back, and the pass is made again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from offload.errors import OutOfDeviceMemoryError
from offload.memory.device import OUT_OF_MEMORY
from triforce_core.decoding.context import Context
from triforce_core.decoding.drafting import Drafting

_Given = TypeVar("_Given")


def shrinking(
    context: Context,
    drafting: Drafting,
    run: Callable[[], _Given],
    kept: int,
    dropped: Callable[[], None],
) -> _Given:
    """What `run` gives: a step of a decoder, or the reading of a prompt, that leaves no trace but
    the KV of passes if the device has no memory for it. It is run again then, each time with less:
    in the order of what it costs: KV that is lent memory, slots, KV that stays on the device,
    recorded forwards, the retrieval model, the drafter. The law of a text is what it was,
    and that of greedy decoding the same text.

    kept: tokens whose KV holds before. dropped: called when a level was dropped, for good: a
        decoder that was made before is of no use then
    Raises OutOfDeviceMemoryError when there is nothing to give back.
    """
    failed = False
    while True:
        try:
            if failed:
                # That takes a little memory too.
                context.abandon(kept)
            return run()
        except OUT_OF_MEMORY as error:
            why = str(error).splitlines()[0]
        # Behind the handler: the error holds whatever the pass had allocated.
        failed = True
        context.passes.end()
        if context.passes.give_up_lent():
            given = "KV that lay in lent memory streams"
        elif drafting.give_up_slots(context):
            given = "copies run less far ahead"
        elif drafting.give_up_resident(context):
            given = "all KV streams"
        elif drafting.give_up_recorded(context):
            given = "what drafts is launched kernel by kernel"
        elif level := drafting.give_up(context):
            given = f"the level {level!r} is dropped"
            dropped()
        else:
            raise OutOfDeviceMemoryError(why)
        warnings.warn(
            f"the device ran out of memory ({why}); {given}", RuntimeWarning, stacklevel=2
        )
