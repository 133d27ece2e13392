"""Why a plan lacks a level, in words for the user."""

from __future__ import annotations

from triforce_core.settings import EXACT, SPLIT, MethodSettings
from triforce_offload.plan.memory_plan import MemoryPlan

# Why an MTP head that nobody asked for does not draft.
HEAD_LEFT_OUT = "its MTP head does not draft, since the plan without it is faster"


def no_retrieval(method: MethodSettings, memory: MemoryPlan, *, fits: bool) -> str:
    """Return why there is no retrieval level, although the method was left open.

    fits: whether there is memory for one, as far as is known
    """
    if not memory.streams:
        why = "nothing streams, and it would read the same weights as a pass"
    elif memory.can_draft:
        why = "drafts without it are faster" if fits else "there is no room for it"
    elif method.draft_weights == EXACT:
        why = "weights stream"
    elif method.draft_weights == SPLIT:
        why = "the high bits of some layers stream"
    elif fits:
        why = "weights stream and copies of them do not pay"
    else:
        why = "weights stream and no copies of them are on the device"
    return f"no retrieval level, since {why}"
