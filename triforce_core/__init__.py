"""Tokens: model definition, laws, decoding, engine, command line.

from triforce_core import Engine, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triforce_core.engine import Engine
    from triforce_core.params import SamplingParams
    from triforce_core.stream import Completion

__all__ = ["Completion", "Engine", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `triforce --help` does not wait for torch.
    if name in ("Engine", "Completion"):
        from triforce_core import engine

        return getattr(engine, name)
    if name == "SamplingParams":
        from triforce_core.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
