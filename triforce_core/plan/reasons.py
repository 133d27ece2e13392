"""Why a plan lacks a level, in words for the user."""

from __future__ import annotations

from triforce_core.settings import EXACT, SPLIT, MethodSettings
from triforce_offload.plan.memory_plan import MemoryPlan

# Why an MTP head that nobody asked for does not draft.
HEAD_LEFT_OUT = "its MTP head does not draft, since the plan without it is faster"


def no_retrieval(method: MethodSettings, memory: MemoryPlan) -> str:
    """Return why there is no retrieval level, although the method was left open."""
    if not memory.streams:
        why = "nothing streams, and it would read the same weights as a pass"
    elif memory.can_draft:
        why = "there is no room for it, or drafts without it are faster"
    elif method.draft_weights == EXACT:
        why = "weights stream"
    elif method.draft_weights == SPLIT:
        why = "the high bits of some layers stream"
    else:
        why = "weights stream and copies of them do not fit or do not pay"
    return f"no retrieval level, since {why}"
