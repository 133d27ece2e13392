"""From settings, a model and a machine to the plan that loading executes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace

from triforce_core.model.sharing.share import Pieces
from triforce_core.plan import by_time
from triforce_core.plan.by_time import Whole
from triforce_core.plan.choice import Choice, Peers
from triforce_core.plan.fitting import ProcessorShares, Resolved, fit, with_what_fits
from triforce_core.plan.formats import with_split_unasked
from triforce_core.plan.machine import Room
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import AUTO, EngineConfig
from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.machine.profiles import Hardware
from triforce_offload.ranks import Alone

ALONE = Alone()


def resolve(
    sizes: ModelSizes,
    config: EngineConfig,
    room: Room,
    pieces: Pieces,
    unsplit: Collection[str] = (),
    *,
    hardware: Hardware | None = None,
    whole: Whole | None = None,
    peers: Peers = ALONE,
) -> Resolved:
    """Choose what the settings leave open, within the available memory.

    sizes: sizes in the formats that the settings ask for (`formats.with_asked_formats`)
    pieces: of quantised matrices. unsplit: matrices that cannot be split
    hardware: rates of the device; None if they are not known: a rule by bytes decides then
    whole: the model of which this rank has a share; None if it has the whole model
    peers: the ranks that share the model

    Raises UsageError, RankError, or DoesNotFitError, which says what would fit.
    """
    alone, room_of_all = whole is None, room.agreed(peers.least)
    choice = Choice()
    if not peers.index and hardware is not None and by_time.decides(config, sizes):
        model = whole or Whole(sizes.config, sizes.drafter, pieces, sizes.head_pieces)
        with suppress(DoesNotFitError):
            best = by_time.fastest(sizes, config, room_of_all, model, hardware)
            choice = Choice.of(best)
    choice = peers.of_first(choice)
    resolved = None
    if choice.decided:
        resolved = _by_time(choice, sizes, config, room, pieces, unsplit, peers)
    return resolved or _by_rule(sizes, config, room, unsplit, alone=alone, agreed=peers.least)


def _by_time(
    choice: Choice,
    sizes: ModelSizes,
    config: EngineConfig,
    room: Room,
    pieces: Pieces,
    unsplit: Collection[str],
    peers: Peers,
) -> Resolved | None:
    """Return a choice as this rank has room for it, None if a rank has none."""
    chosen = choice.sizes(sizes, pieces, unsplit)
    if not choice.budget:
        budgets: Iterable[int] = (0,)
    elif sizes.method.budget is not None:
        budgets = (sizes.method.budget,)
    else:
        budgets = by_time.budgets_below(choice.budget)
    for budget in budgets:
        method = replace(chosen.method, budget=budget) if budget else chosen.method
        fitted = None
        with suppress(DoesNotFitError):
            fitted = placed(replace(chosen, method=method), config, room, budget, choice.shares)
        if not peers.least(int(fitted is not None)):
            continue
        # Layers that passes read from files would be split in each pass.
        splits = chosen.weights.split and not sizes.weights.split
        if not peers.least(int(not (splits and fitted.memory.weights_file_bytes))):
            return None
        return replace(fitted, sizes=chosen, seconds_per_token=choice.seconds_per_token)
    return None


def _by_rule(
    sizes: ModelSizes,
    config: EngineConfig,
    room: Room,
    unsplit: Collection[str],
    *,
    alone: bool,
    agreed: Callable[[int], int],
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
