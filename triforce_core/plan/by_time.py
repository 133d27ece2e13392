"""The formats and the retrieval cache of an engine, chosen by the seconds that a token takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from triforce_core.model.config import ModelConfig
from triforce_core.model.sharing.share import Pieces
from triforce_core.params import SamplingParams
from triforce_core.plan.formats import SPLITS, may_split_weights
from triforce_core.plan.machine import Room
from triforce_core.plan.simulation.acceptance_curve import (
    AcceptanceCurve,
    drafter_acceptance,
)
from triforce_core.plan.simulation.candidates import Candidate
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.search import choose
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import AUTO, LEAST_BUDGET, EngineConfig
from triforce_offload.machine.processor import measure_processor
from triforce_offload.machine.profiles import Hardware
from triforce_offload.memory.available import LIBRARY_BYTES
from triforce_offload.plan.placing import for_processor
from triforce_offload.weights.formats import DTYPES, dtype_name

# Layers in files are read at this rate, where nobody measured the disk.
_DISK_BYTES_PER_SECOND = 3e9


class Whole(NamedTuple):
    """A model of which one rank may have a share.

    drafter: config of the draft model or head, None for n-grams
    pieces: pieces of its quantised matrices
    drafter_pieces: those of what drafts, if it is a model or a head
    """

    config: ModelConfig
    drafter: ModelConfig | None
    pieces: Pieces
    drafter_pieces: Pieces | None = None


def decides(config: EngineConfig, sizes: ModelSizes) -> bool:
    """Return whether seconds decide: if the placement is left to choose, where the kernels run that
    the costs count.
    """
    if sizes.max_context < 2 or config.placement is not None:
        return False
    # Without its kernels, nothing is known of a processor that has to compute a share of layers.
    asked = config.host_compute not in (AUTO, 0)
    return sizes.device.kernels and (not asked or measure_processor() is not None)


def fastest(
    sizes: ModelSizes, config: EngineConfig, room: Room, model: Whole, hardware: Hardware
) -> Candidate:
    """Return the plan with the least simulated seconds per token, as `triforce plan` does. The
    processor is measured if it may compute layers.

    sizes: of the first rank, in the formats that were asked for
    room: memory that every rank has
    Raises UsageError or DoesNotFitError.
    """
    case = _case(sizes, config, room, model, hardware)
    if config.host_compute in (AUTO, 0):
        best = choose(replace(case, host_compute=0.0))
        # Rows that the processor computed would have other bits.
        may = config.host_compute == AUTO and not sizes.same_bits
        away = for_processor(best.memory) or best.memory.kv.away
        if not (may and away and measure_processor()):
            return best
    # Without kernels, seconds do not decide where a share is asked for (`decides`).
    rates = measure_processor()
    # The other ranks wait meanwhile. Some of the cores read memory nearly as fast as all of them.
    hardware = replace(
        case.hardware,
        processor_bytes_per_second=rates.bytes_per_second,
        host_flops_per_second=case.hardware.gpus * rates.flops_per_second,
    )
    return choose(replace(case, hardware=hardware))


def _case(
    sizes: ModelSizes, config: EngineConfig, room: Room, model: Whole, hardware: Hardware
) -> Case:
    """Return the input of the planner for an engine."""
    method, context = sizes.method, sizes.max_context
    curve = AcceptanceCurve()
    if model.drafter:
        curve = replace(curve, inner=drafter_acceptance(model.drafter))
    quantised = bool(sizes.weights.block_types)
    fixed: dict[str, object] = {"method": method.method} if method.method != "triforce" else {}
    for name in ("budget", "fixed_draft_tokens", "fixed_inner_draft_tokens"):
        if (value := getattr(method, name)) is not None:
            fixed[name.removeprefix("fixed_")] = value
    if config.block_tokens is not None:
        fixed["block_tokens"] = config.block_tokens
    auto = {"weights": may_split_weights(sizes, config), "kv": config.kv == AUTO}
    return Case(
        model.config,
        _within(hardware, room),
        context,
        max(1, min(SamplingParams.max_new_tokens, context - 1)),
        DTYPES[dtype_name(sizes.dtype)],
        curve,
        str(method.draft),
        model.drafter,
        model.pieces if quantised else None,
        model.drafter_pieces,
        split=config.weights if config.weights in SPLITS else None,
        split_kv=sizes.kv_split,
        auto=frozenset(name for name, free in auto.items() if free),
        method=method,
        host_compute=config.host_compute,
        sequences=config.sequences,
        fixed=fixed,
        device=sizes.device,
    )


def budgets_below(budget: int) -> Iterator[int]:
    """Yield a budget and its halves: an engine that learns how long drafts are takes more
    workspace than a plan with one length.
    """
    while budget >= LEAST_BUDGET:
        yield budget
        budget //= 2


def _within(hardware: Hardware, room: Room) -> Hardware:
    """Return the hardware with as much memory as there is here."""
    host = room.host_bytes
    if host is not None:
        host = hardware.gpus * min(host, host if room.host_limit is None else room.host_limit)
    return replace(
        hardware,
        memory_bytes=room.device_bytes + LIBRARY_BYTES,
        host_memory_bytes=host,
        disk_bytes_per_second=_DISK_BYTES_PER_SECOND if room.reads_files else None,
    )
