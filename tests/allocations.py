"""What torch's CPU allocator hands out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

from torch.profiler import ProfilerActivity, profile


def allocated_peak(run: Callable[[], None], mapped_bytes: int) -> int:
    """Most bytes that torch's CPU allocator handed out at once while `run` ran.

    Host arenas are mappings of their own and not among them, nor is a mapped checkpoint of
    `mapped_bytes`: what remains is the device. The allocator's own sum is read, which it keeps
    under a lock: a sum over events in the order of their clocks can put a release before the
    allocation that another core made earlier.
    """
    gc.collect()  # What earlier tests left would be released during the run.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    counted = [
        event
        for event in _memory_events(profiler.profiler.kineto_results.experimental_event_tree())
        if abs(event.extra_fields.alloc_size) != mapped_bytes
    ]
    first = min(counted, key=lambda event: event.start_time_ns).extra_fields
    most = max(event.extra_fields.total_allocated for event in counted)
    return most - (first.total_allocated - first.alloc_size)


def _memory_events(events: list) -> Iterator:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            yield event
