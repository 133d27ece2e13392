"""What of a model's wishes a device can fulfil; no tensors."""

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

# Where nothing streams a retrieval model saves nothing but reads of KV. It must read so much less
# than the target, weights included, to be made unasked.
_LEAST_SAVING = 1.25
# A card's memory is so many times as fast as its link: 1008 to 25 GB/s on an RTX 4090.
_MEMORY_TO_LINK = 40
# Tokens of the shortest context that a refusal looks at.
_SHORTEST_CONTEXT = 16


@dataclass(frozen=True)
class Fitted:
    """Where everything goes, and the tokens of the retrieval cache, 0 for none."""

    memory: MemoryPlan
    budget: int


def fit(
    wanted: ModelSizes,
    available_bytes: int,
    placement: Placement | None = None,
    most_budget: int | None = None,
) -> Fitted:
    """The best of what is wanted that `available_bytes` of the device hold.

    placement: where everything goes, instead of `place`'s choice. most_budget: tokens of the
    retrieval cache that other ranks have room for. The retrieval model computes with
    the target's own layers, or, of those that stream, with high bits or copies in 4 bits: it is
    there if one or the other of each is on the device. Its cache is the largest with which no layer
    streams, or else the largest that fits. The level is left out where nothing streams and a pass
    reads little more than it would; the drafter then proposes to the target directly. A budget
    that was asked for is never given up: it fits or is refused. Where nothing streams and nothing
    chooses from the KV, that is one block. Raises DoesNotFitError, or UsageError.
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
            # A smaller cache may leave room for all layers, and then nothing but KV streams.
            streams_layers = streams_layers or fitted
        # A cache that nobody asked for must not make passes wait for the link that would not.
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
    """The refusal, with what would fit instead.

    context: tokens that were refused, with `budget` for the retrieval cache if one was asked for
    refusal: of a context of so many tokens without a budget, None if it fits
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
    """The refusal of a retrieval cache where so many layers stream that nothing stands in for."""
    return UsageError(
        f"a retrieval budget of {budget} tokens needs all weights on the device, themselves, their "
        f"high bits or in 4 bits, and the placement streams {streamed} layers"
    )


def _can_draft(wanted: ModelSizes, placement: Placement) -> bool:
    """Whether the retrieval level finds every layer on the device under a user's placement."""
    if wanted.int4_layout is None:
        placement = replace(placement, int4_layers=())
    return placement.can_draft


def _is_hidden(plan: MemoryPlan) -> bool:
    """Whether what streams in a pass comes while the pass reads what is on the device."""
    return plan.link_bytes * _MEMORY_TO_LINK <= _read_bytes(plan.requirements)


def may_save(plan: MemoryPlan, budget: int) -> bool:
    """Whether a retrieval level of a budget could save time under a plan without one."""
    if plan.streams:
        return True
    needs = plan.requirements
    kept = min(budget, needs.context_tokens)
    return _read_bytes(needs) >= _LEAST_SAVING * _read_bytes(needs, kept)


def _read_bytes(demand: Requirements, tokens: int | None = None) -> int:
    """Weights and KV that a forward reads. tokens: of the context, all of it if None"""
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
