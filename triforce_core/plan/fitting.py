"""Fitting a model, its context and its retrieval cache into a device. No tensors are created."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import INT4
from triforce_offload.errors import DoesNotFitError, UsageError, in_units
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import least_bytes, place
from triforce_offload.plan.requirements import Requirements

# If nothing streams, a retrieval level saves only reads of KV. Unless requested, it is created only
# if the target reads at least this many times as much, weights included.
_LEAST_SAVING = 1.25
# Ratio of a card's memory bandwidth to that of its link: 1008 to 25 GB/s on an RTX 4090.
_MEMORY_TO_LINK = 40
# Number of tokens of the shortest context that an error message considers.
_SHORTEST_CONTEXT = 16


@dataclass(frozen=True)
class Fitted:
    """A placement, and the number of tokens of the retrieval cache, 0 for none."""

    memory: MemoryPlan
    budget: int


def fit(
    wanted: ModelSizes,
    available_bytes: int,
    placement: Placement | None = None,
    most_budget: int | None = None,
) -> Fitted:
    """Return the best placement and retrieval budget within `available_bytes` of the device.

    The retrieval level computes with the target's layers, and for streamed layers with their high
    bits or int4 copies. It exists only if one of these is on the device for each layer. Its cache
    is the largest with which no layer streams, or else the largest that fits. There is no retrieval
    level if nothing streams and a pass reads little more than the level would; the drafter then
    proposes to the target directly. A budget that the user set is never reduced: it fits or raises
    an error. If nothing streams and there is no retrieval cache, all KV is one block.

    placement: a placement to use instead of the choice of `place`
    most_budget: the largest budget that other ranks have room for
    Raises DoesNotFitError or UsageError.
    """
    fitted = _fit(wanted, available_bytes, placement, most_budget)
    asked = placement or fitted.budget or wanted.block_tokens
    if asked or fitted.memory.streams:
        return fitted
    block = max(wanted.method.chunk_size, 1 << wanted.max_context.bit_length())
    whole = replace(wanted, block_tokens=block).requirements(0)
    try:
        chosen = place(whole, available_bytes)
    except DoesNotFitError:
        return fitted
    return fitted if chosen.streams else Fitted(chosen, 0)


def _fit(
    wanted: ModelSizes, available_bytes: int, placement: Placement | None, most_budget: int | None
) -> Fitted:
    method = wanted.method
    without = wanted.requirements(0)

    def plan_of(needs: Requirements) -> MemoryPlan:
        return MemoryPlan(needs, placement) if placement else place(needs, available_bytes)

    if method.method != "triforce" or most_budget == 0:
        return Fitted(plan_of(without), 0)
    if placement and not _can_draft(wanted, placement):
        if method.budget is not None:
            raise needs_weights(method.budget, len(placement.streamed_layers))
        return Fitted(MemoryPlan(without, placement), 0)
    if placement and method.draft_weights == INT4:
        placement = replace(placement, int4_layers=tuple(range(without.layers)))
    if method.budget is None:
        placed = plan_of(without)
        streaming = placed.streams
        if not may_save(placed, method.budgets[0]):
            return Fitted(placed, 0)
    else:
        token_bytes = without.kv.token_bytes
        if wanted.rounds_kv:
            token_bytes //= wanted.dtype.itemsize
        cache = method.budget * token_bytes * len(wanted.config.kv_layers) * wanted.sequences
        if cache > available_bytes:
            raise _refused("for", method.budget, cache, available_bytes)
    streams_layers: Fitted | None = None
    for budget in method.budgets:
        if most_budget is not None and budget > most_budget:
            continue
        demand = wanted.requirements(budget)
        if placement:
            return Fitted(MemoryPlan(demand, placement), budget)
        try:
            chosen = place(demand, available_bytes)
        except DoesNotFitError as error:
            needed = error.needed_bytes
            continue
        fitted = Fitted(chosen, budget)
        if not chosen.can_draft:
            needed = least_bytes(demand, streamed_layers=0)
        elif method.budget is not None or (streaming and not chosen.weights_link_bytes):
            return fitted
        elif streaming:
            # With a smaller cache all layers may fit, and only KV streams.
            streams_layers = streams_layers or fitted
        # An unrequested cache must not make passes wait for the link.
        elif _is_hidden(chosen):
            return fitted
    if streams_layers is not None:
        return streams_layers
    if method.budget is not None:
        raise _refused("with", method.budget, needed, available_bytes)
    return Fitted(placed, 0)


def with_what_fits(
    refused: DoesNotFitError,
    context: int,
    refusal: Callable[[int], DoesNotFitError | None],
    budget: int | None,
) -> DoesNotFitError:
    """Return the error extended by a suggestion of what would fit.

    context: number of tokens that did not fit
    refusal: returns the error for a context of some number of tokens without a retrieval budget, or
        None if it fits
    budget: retrieval budget that the user set, or None
    """
    without = "" if budget is None else f" without the budget of {budget} tokens"
    least = min(_SHORTEST_CONTEXT, context)
    if budget is not None and refusal(context) is None:
        remedy = f"it fits{without}"
    elif (shortest := refusal(least)) is not None:
        remedy = (
            f"no context fits: {least} tokens{without} need {in_units(shortest.needed_bytes)} of "
            f"{'host' if 'host memory' in shortest.what else 'device'} memory"
        )
    else:
        low, high = least, context
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if refusal(middle) else (middle, high)
        remedy = f"up to {low} tokens of context fit{without}"
    return DoesNotFitError(refused.what, refused.needed_bytes, refused.available_bytes, remedy)


def needs_weights(budget: int, streamed: int) -> UsageError:
    """Return the error for a retrieval budget if `streamed` layers stream without a copy on the
    device.
    """
    return UsageError(
        f"a retrieval budget of {budget} tokens needs all weights on the device, themselves, their "
        f"high bits or in 4 bits, and the placement streams {streamed} layers"
    )


def _can_draft(wanted: ModelSizes, placement: Placement) -> bool:
    """Whether every layer, or a copy of it, is on the device with a user's placement."""
    if wanted.int4_layout is None:
        placement = replace(placement, int4_layers=())
    return placement.can_draft


def _is_hidden(plan: MemoryPlan) -> bool:
    """Whether the streams of a pass are hidden behind its reads of device memory."""
    return plan.link_bytes * _MEMORY_TO_LINK <= _read_bytes(plan.requirements)


def may_save(plan: MemoryPlan, budget: int) -> bool:
    """Whether a retrieval level with this budget could save time. plan: the plan without one"""
    if plan.streams:
        return True
    needs = plan.requirements
    kept = min(budget, needs.context_tokens)
    return _read_bytes(needs) >= _LEAST_SAVING * _read_bytes(needs, kept)


def _read_bytes(demand: Requirements, tokens: int | None = None) -> int:
    """Return the bytes of weights and KV that a forward reads.

    tokens: number of context tokens that it attends to, None for the whole context
    """
    tokens = demand.context_tokens if tokens is None else tokens
    kv = tokens * demand.kv.token_bytes * demand.kv.layers
    return demand.weights_bytes + demand.head_bytes + kv


def _refused(how: str, budget: int, needed: int, available_bytes: int) -> DoesNotFitError:
    return DoesNotFitError(
        f"device memory {how} a retrieval budget of {budget} tokens",
        needed,
        available_bytes,
        "use a smaller budget or none, or more device memory",
    )
