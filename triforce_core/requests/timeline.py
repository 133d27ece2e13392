"""Files with the timeline of a request on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from triforce_core.decoding.contexts.calls import ClearTrace, Spans
from triforce_core.decoding.contexts.models import Models
from triforce_core.requests.stream import Completion
from triforce_offload.link.trace import write_spans

_TOLD = ("method", "model", "device", "dtype", "prompt_tokens", "new_tokens", "link")


def clear_timeline(models: Models) -> None:
    """Discard the trace so far, on all ranks. Raises RankError."""
    models.ranks.tell(ClearTrace())
    models.runtime.trace.clear()


def traced(
    receive: Callable[[Any], None], models: Models, path: Path, *, afresh: bool
) -> Callable[[Any], None]:
    """Return a receiver that writes the trace when the request ends, before passing on its
    completion.

    afresh: whether to discard the trace so far
    """
    if afresh:
        clear_timeline(models)

    def told(item: Any) -> None:
        try:
            if isinstance(item, Completion):
                write_timeline(models, path, item.stats)
        finally:
            receive(item)

    return told


def write_timeline(models: Models, path: Path, stats: Mapping[str, Any]) -> None:
    """Write the trace. stats: stats of the request. Raises OutputError or RankError."""
    asked = time.perf_counter()
    answers = models.ranks.ask(Spans())
    here = (asked + time.perf_counter()) / 2
    # Different machines have different clocks; ranks on one machine share a clock.
    apart = models.ranks.here < models.ranks.count
    spans = [[span.later(here - now if apart else 0.0) for span in spans] for now, spans in answers]
    about = {name: stats[name] for name in _TOLD}
    write_spans([models.runtime.trace.spans(), *spans], path, about)
