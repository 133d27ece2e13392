"""Plans for one case with several contexts, links or numbers of GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.prediction import predict
from triforce_core.plan.simulation.search import choose
from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.machine.profiles import Hardware, with_link

LINKS = ("pcie3x8", "pcie3x16", "pcie4x8", "pcie4x16", "pcie5x8", "pcie5x16")
_LEAST_CONTEXT = 4096


def sweep(case: Case, kind: str, longest: int | None = None) -> list[dict[str, Any]]:
    """Return one row for each value. A case that does not fit has `refused` instead of figures.

    longest: the longest context of a sweep over contexts; None for the model's
    """
    return [_row(each) for each in _cases(case, kind, longest or case.config.positions)]


def _cases(case: Case, kind: str, longest: int) -> list[Case]:
    several = max(2, case.hardware.gpus)
    if kind == "gpus":
        counts = range(1, several + 1)
        return [replace(case, hardware=_gpus(case.hardware, gpus)) for gpus in counts]
    if kind == "link":
        slots = [with_link(case.hardware, link) for link in LINKS]
        # Links faster than the card supports give the same result.
        distinct = {hardware.link: hardware for hardware in slots}
        return [replace(case, hardware=hardware) for hardware in distinct.values()]
    contexts = []
    size = _LEAST_CONTEXT
    while size < longest:
        contexts.append(size)
        size *= 2
    contexts.append(longest)
    return [
        replace(
            case,
            context=context,
            new_tokens=min(case.new_tokens, context - 1),
            hardware=_gpus(case.hardware, gpus),
        )
        for gpus in (1, several)
        for context in contexts
    ]


def _gpus(hardware: Hardware, gpus: int) -> Hardware:
    return replace(hardware, gpus=gpus)


def _row(case: Case) -> dict[str, Any]:
    hardware = case.hardware
    row: dict[str, Any] = {
        "gpu": hardware.name,
        "gpus": hardware.gpus,
        "link": hardware.link,
        "context": case.context,
    }
    try:
        chosen = choose(case)
    except (DoesNotFitError, UsageError) as error:
        return row | {"refused": str(error)}
    prediction = predict(chosen)
    return row | {
        "method": chosen.plan.method.method,
        "budget": chosen.plan.budget,
        "draft_tokens": chosen.plan.method.draft_tokens,
        **{
            name: getattr(prediction, name)
            for name in (
                "seconds_per_token",
                "seconds_per_pass",
                "draft_seconds",
                "tokens_per_pass",
                "bytes_per_pass",
                "floor_seconds_per_pass",
                "seconds_to_first_token",
            )
        },
    }
