"""Tokens: model definition, laws, decoding, engine, command line.

from triforce_core import Engine, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine
    from .params import SamplingParams
    from .stream import Completion

__all__ = ["Completion", "Engine", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `triforce --help` does not wait for torch.
    if name in ("Engine", "Completion"):
        from . import engine

        return getattr(engine, name)
    if name == "SamplingParams":
        from .params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
