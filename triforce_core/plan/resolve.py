"""From settings, a model and a machine to the plan that loading executes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace

from triforce_core.model.sharing.share import Pieces
from triforce_core.plan import by_time
from triforce_core.plan.by_time import Whole
from triforce_core.plan.fitting import ProcessorShares, Resolved, fit, with_what_fits
from triforce_core.plan.formats import with_split_unasked
from triforce_core.plan.machine import Agreed, Room
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import AUTO, EngineConfig
from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.machine.profiles import Hardware


def resolve(
    sizes: ModelSizes,
    config: EngineConfig,
    room: Room,
    pieces: Pieces,
    unsplit: Collection[str] = (),
    *,
    hardware: Hardware | None = None,
    whole: Whole | None = None,
    agreed: Agreed = lambda number: number,
) -> Resolved:
    """Choose what the settings leave open, within the available memory.

    sizes: sizes in the formats that the settings ask for (`formats.with_asked_formats`)
    pieces: of quantised matrices. unsplit: matrices that cannot be split
    hardware: rates of the device, the same on all ranks; None if they are not known: a rule by
        bytes decides then
    whole: the model of which this rank has a share; None if it has the whole model
    agreed: returns the least number that any rank has, given this rank's

    Raises UsageError, or DoesNotFitError, which says what would fit.
    """
    resolved = None
    if hardware is not None and by_time.decides(config, sizes):
        model = whole or Whole(sizes.config, sizes.drafter, pieces)
        resolved = _by_time(sizes, config, room, pieces, model, unsplit, hardware, agreed)
    alone = whole is None
    return resolved or _by_rule(sizes, config, room, unsplit, alone=alone, agreed=agreed)


def _by_time(
    sizes: ModelSizes,
    config: EngineConfig,
    room: Room,
    pieces: Pieces,
    model: Whole,
    unsplit: Collection[str],
    hardware: Hardware,
    agreed: Agreed,
) -> Resolved | None:
    """Return what `triforce plan` chooses, None if the engine has no room for it. All ranks come to
    the same end, since they choose from the same numbers.
    """
    try:
        best = by_time.fastest(sizes, config, room.agreed(agreed), model, hardware, agreed)
    except DoesNotFitError:
        return None
    shares = ProcessorShares.of(best.memory)
    chosen = by_time.with_choice(sizes, best, pieces, unsplit)
    if not best.plan.budget:
        budgets: Iterable[int] = (0,)
    elif sizes.method.budget is not None:
        budgets = (sizes.method.budget,)
    else:
        budgets = by_time.budgets_below(best.plan.budget)
    for budget in budgets:
        method = replace(chosen.method, budget=budget) if budget else chosen.method
        fitted = None
        with suppress(DoesNotFitError):
            fitted = placed(replace(chosen, method=method), config, room, budget, shares)
        if not agreed(int(fitted is not None)):
            continue
        # Layers that passes read from files would be split in each pass.
        splits = chosen.weights.split and not sizes.weights.split
        if not agreed(int(not (splits and fitted.memory.weights_file_bytes))):
            return None
        return replace(fitted, sizes=chosen, seconds_per_token=best.seconds_per_token)
    return None


def _by_rule(
    sizes: ModelSizes,
    config: EngineConfig,
    room: Room,
    unsplit: Collection[str],
    *,
    alone: bool,
    agreed: Agreed,
) -> Resolved:
    asked, fitting = sizes, _fitting_smaller_copies_too if alone else _fitting
    sizes = with_split_unasked(sizes, config, room.device_bytes, unsplit)
    fitted = fitting(sizes, config, room)
    if fitted.memory.weights_file_bytes and sizes is not asked:
        # Layers in files would have to be split again in every pass, so do not split weights.
        sizes = replace(sizes, layouts=asked.layouts)
        fitted = fitting(sizes, config, room)
    budget = agreed(fitted.budget)
    method = sizes.method.with_smaller_copies
    if not (alone or budget or method is None):
        # All ranks know that one of them has no room for a retrieval level.
        smaller = replace(sizes, method=method)
        again = _fitting(smaller, config, room)
        if shared := agreed(again.budget):
            sizes, fitted, budget = smaller, again, shared
    return fitted if budget == fitted.budget else _fitting(sizes, config, room, budget)


def placed(
    sizes: ModelSizes,
    config: EngineConfig,
    room: Room,
    most_budget: int | None = None,
    shares: ProcessorShares | None = None,
) -> Resolved:
    """Place a model within the room.

    most_budget: the most tokens that the retrieval cache may have
    shares: what the processor computes; None for what the settings say
    Raises UsageError or DoesNotFitError.
    """
    placement = config.placement
    if placement is not None and placement.expert_slots and config.host_compute != AUTO:
        # Pools have the place of experts that are on the device without them.
        placement = None
    fitted = fit(sizes, room.device_bytes, placement, most_budget)
    memory = fitted.memory
    if shares is None and config.host_compute != AUTO:
        shares = ProcessorShares.asked(config.host_compute, sizes.weights)
    if shares is not None and not fitted.budget:
        memory = shares.with_streamed_layers(memory)
    memory = room.with_files(memory)
    if shares is not None:
        memory = shares.placed_on_processor(memory, room)
    return replace(fitted, memory=memory)


def _fitting_smaller_copies_too(sizes: ModelSizes, config: EngineConfig, room: Room) -> Resolved:
    """Return what `_fitting_chains_too` does. If layers stream and there is no retrieval level, or
    no room, draft copies have fewer bits if that makes room for one.
    """
    method = sizes.method.with_smaller_copies
    if method is None:
        return _fitting_chains_too(sizes, config, room)
    smaller = replace(sizes, method=method)
    try:
        fitted = _fitting_chains_too(sizes, config, room)
    except UsageError:
        with suppress(DoesNotFitError, UsageError):
            return _fitting_chains_too(smaller, config, room)
        raise
    except DoesNotFitError as error:
        try:
            return _fitting_chains_too(smaller, config, room)
        except DoesNotFitError as other:
            # They may lack the memory for another part than the copies.
            raise min(other, error, key=lambda each: each.needed_bytes) from None
    if fitted.budget or not fitted.memory.streamed_layers:
        return fitted
    again = _fitting_chains_too(smaller, config, room)
    return again if again.budget else fitted


def _fitting_chains_too(sizes: ModelSizes, config: EngineConfig, room: Room) -> Resolved:
    """Return what `_fitting` does. If there is no room for a retrieval level that drafts trees
    unasked, it drafts chains.
    """
    chains = sizes.drafting_chains
    if chains is None:
        return _fitting(sizes, config, room)
    try:
        fitted = placed(sizes, config, room)
    except DoesNotFitError:
        return _fitting(chains, config, room)
    if fitted.budget:
        return fitted
    smaller = _fitting(chains, config, room)
    return smaller if smaller.budget else fitted


def _fitting(
    sizes: ModelSizes, config: EngineConfig, room: Room, most_budget: int | None = None
) -> Resolved:
    """Return what `placed` does. If the model does not fit, the error says what would."""
    try:
        return placed(sizes, config, room, most_budget)
    except DoesNotFitError as error:
        if config.placement is not None:
            raise
        without_budget = replace(sizes.method, budget=None)

        def refusal(context: int) -> DoesNotFitError | None:
            shorter = replace(sizes, max_context=context, method=without_budget)
            try:
                placed(shorter, config, room)
            except DoesNotFitError as error:
                return error
            return None

        budget = sizes.method.budget
        raise with_what_fits(error, sizes.max_context, refusal, budget) from error
