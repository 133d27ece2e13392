"""What is done once and slows the round it falls in: a kernel compiled, a graph recorded."""

from __future__ import annotations

from functools import cache
from typing import Any

_events = 0


def events() -> int:
    """How often that happened in this process. A round that saw it grow was no usual one."""
    return _events


def note(*_: Any, **__: Any) -> None:
    """Counts one of them."""
    global _events
    _events += 1


@cache
def watch_compiler() -> None:
    """From now on kernels that Triton compiles, or loads compiled, are counted."""
    import triton

    # Triton before 3.4 has no such hook: there compiling goes unnoticed.
    if (knobs := getattr(triton, "knobs", None)) is None:
        return
    other = knobs.runtime.jit_post_compile_hook

    def hook(*values: Any, **named: Any) -> Any:
        note()
        return other(*values, **named) if other else None

    knobs.runtime.jit_post_compile_hook = hook
