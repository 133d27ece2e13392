"""What torch's CPU allocator hands out."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocated_peak(run: Callable[[], None], mapped_bytes: int) -> int:
    """Most bytes that torch's CPU allocator handed out at once while `run` ran.

    Host arenas are mappings of their own and not among them, nor is a mapped checkpoint of
    `mapped_bytes`: what remains is the device.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes() if abs(event.nbytes()) != mapped_bytes else 0
        peak = max(peak, now)
    return peak
