"""Counts one-time work that slows down the round it falls in: kernels compiled, graphs recorded."""

from __future__ import annotations

from functools import cache
from typing import Any

_events = 0


def events() -> int:
    """Return the number of such events in this process.

    Timings of a round that increases it are not typical.
    """
    return _events


def note(*_: Any, **__: Any) -> None:
    """Count one event."""
    global _events
    _events += 1


@cache
def watch_compiler() -> None:
    """Count kernels that Triton compiles, or loads compiled, from now on."""
    import triton

    # Triton before 3.4 has no such hook, so compilation is not counted there.
    if (knobs := getattr(triton, "knobs", None)) is None:
        return
    other = knobs.runtime.jit_post_compile_hook

    def hook(*values: Any, **named: Any) -> Any:
        note()
        return other(*values, **named) if other else None

    knobs.runtime.jit_post_compile_hook = hook
