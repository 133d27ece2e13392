"""Everything about tokens: model, distributions, decoding, engine and command line.

from triforce_core import Engine, SamplingParams
"""

from __future__ import annotations

from importlib import import_module

# Imported before torch: it limits how long idle threads busy-wait.
import triforce_offload  # noqa: F401

# Type checkers know this name. Importing `typing` would double the time until signals are handled.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from triforce_core.engine import Engine
    from triforce_core.params import SamplingParams
    from triforce_core.plan.plan import Plan
    from triforce_core.requests.stream import Completion
    from triforce_core.settings import EngineConfig
    from triforce_offload.errors import (
        CheckpointError,
        DeviceFailedError,
        DoesNotFitError,
        LinkError,
        OutputError,
        RankError,
        TriforceError,
        UnsupportedModelError,
        UsageError,
    )

__all__ = [
    "CheckpointError",
    "Completion",
    "DeviceFailedError",
    "DoesNotFitError",
    "Engine",
    "EngineConfig",
    "LinkError",
    "OutputError",
    "Plan",
    "RankError",
    "SamplingParams",
    "TriforceError",
    "UnsupportedModelError",
    "UsageError",
]

_PLACES = {
    "Completion": "triforce_core.requests.stream",
    "Engine": "triforce_core.engine",
    "EngineConfig": "triforce_core.settings",
    "Plan": "triforce_core.plan.plan",
    "SamplingParams": "triforce_core.params",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `triforce --help` does not wait for torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES.get(name, "triforce_offload.errors")), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
