"""What of a model's wishes a device can fulfil; no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import DoesNotFitError, UsageError
from offload.placement import Demand, Placement, least_bytes, place, streams
from triforce_core.sizing.demand import Wanted

# Where nothing streams a retrieval model saves nothing but reads of KV. It must read so much less
# than the target, weights included, to be made unasked.
_LEAST_SAVING = 1.25


@dataclass(frozen=True)
class Fitted:
    """What is asked for, where it goes, and the tokens of the retrieval cache, 0 for none."""

    demand: Demand
    placement: Placement
    budget: int


def fit(wanted: Wanted, available_bytes: int, placement: Placement | None = None) -> Fitted:
    """The best of what is wanted that `available_bytes` of the device hold.

    placement: where everything goes, instead of `place`'s choice. The retrieval model computes with
    the target's own weights, so it is there if they all stay on the device; if they have to stream,
    or if nothing does and a pass reads little more than the retrieval model would, the drafter
    proposes to the target directly. A budget that was asked for is never given up: it fits or is
    refused. Raises DoesNotFitError, or UsageError.
    """
    method = wanted.method
    without = wanted.demand(0)
    if method.method != "triforce":
        return Fitted(without, placement or place(without, available_bytes), 0)
    if placement and placement.streamed_layers:
        if method.budget is not None:
            raise UsageError(
                f"a retrieval budget of {method.budget} tokens needs all weights on the device, "
                f"and the placement streams {len(placement.streamed_layers)} layers"
            )
        return Fitted(without, placement, 0)
    if method.budget is None:
        placed = placement or place(without, available_bytes)
        streaming = streams(without, placed)
        if not may_save(without, placed, method.budgets[0]):
            return Fitted(without, placed, 0)
    else:
        cache = method.budget * without.kv.token_bytes * wanted.config.layers
        if cache > available_bytes:
            raise _refused("for", method.budget, cache, available_bytes)
    for budget in method.budgets:
        demand = wanted.demand(budget)
        if placement:
            return Fitted(demand, placement, budget)
        needed = least_bytes(demand, streamed_layers=0)
        if needed <= available_bytes:
            chosen = place(demand, available_bytes)
            # A cache that nobody asked for must not send over the link what would not have to.
            if method.budget is not None or streaming or not streams(demand, chosen):
                return Fitted(demand, chosen, budget)
    if method.budget is not None:
        raise _refused("with", method.budget, needed, available_bytes)
    return Fitted(without, placed, 0)


def may_save(demand: Demand, placement: Placement, budget: int) -> bool:
    """Whether a retrieval model of a budget could save time, where that is placed so."""
    if streams(demand, placement):
        return True
    weights = demand.weights_bytes + demand.head_bytes
    kept = min(budget, demand.context_tokens) * demand.kv.token_bytes * demand.layers
    read = demand.context_tokens * demand.kv.token_bytes * demand.layers
    return weights + read >= _LEAST_SAVING * (weights + kept)


def _refused(how: str, budget: int, needed: int, available_bytes: int) -> DoesNotFitError:
    return DoesNotFitError(
        f"device memory {how} a retrieval budget of {budget} tokens",
        needed,
        available_bytes,
        "use a smaller budget or none, a shorter context or more device memory",
    )
