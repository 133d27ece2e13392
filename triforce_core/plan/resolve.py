"""From settings, a model and a machine to the plan that loading executes.

`resolve` takes the fastest plan by simulated seconds, where a device's rates are known
(`_by_time`), or the first of a few variants that has a retrieval level (`_by_rule`). Either way
`fit_machine` places each variant: `fit_device` divides it between the device and the link, and what
is not on the device goes to host memory, to files, or to the processor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from triforce_core.model.sharing.share import Pieces
from triforce_core.plan import by_time
from triforce_core.plan.by_time import Whole
from triforce_core.plan.choice import Choice
from triforce_core.plan.fitting import ProcessorShares, Resolved, fit_device, with_what_fits
from triforce_core.plan.formats import with_split_unasked
from triforce_core.plan.machine import Room
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import AUTO, EngineConfig
from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.machine.profiles import Hardware
from triforce_offload.ranks import Alone, Ranks, all_agree

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
    ranks: Ranks = ALONE,
) -> Resolved:
    """Choose what the settings leave open, within the available memory.

    sizes: sizes in the formats that the settings ask for (`formats.with_asked_formats`)
    pieces: of quantised matrices. unsplit: matrices that cannot be split
    hardware: rates of the device; None if they are not known: a rule by bytes decides then
    whole: the model of which this rank has a share; None if it has the whole model
    ranks: the ranks that share the model

    Raises UsageError, RankError, or DoesNotFitError, which says what would fit.
    """
    room_of_all, choice = room.agreed(ranks.least), Choice()
    if not ranks.index and hardware is not None and by_time.decides(config, sizes):
        model = whole or Whole(sizes.config, sizes.drafter, pieces, sizes.drafter_pieces)
        with suppress(DoesNotFitError):
            best = by_time.fastest(sizes, config, room_of_all, model, hardware)
            choice = Choice.of(best)
    choice = ranks.of_first(choice)
    resolved = None
    if choice.decided:
        resolved = _by_time(choice, sizes, config, room, pieces, unsplit, ranks)
    return resolved or _by_rule(sizes, config, room, unsplit, ranks)


def fits_by_rule(
    sizes: ModelSizes, config: EngineConfig, room: Room, unsplit: Collection[str]
) -> bool:
    """Return whether there is a place for a rank's share, whatever the other ranks have room for.

    Raises UsageError.
    """
    try:
        _by_rule(sizes, config, room, unsplit, ALONE)
    except DoesNotFitError:
        return False
    return True


def _by_time(
    choice: Choice,
    sizes: ModelSizes,
    config: EngineConfig,
    room: Room,
    pieces: Pieces,
    unsplit: Collection[str],
    ranks: Ranks,
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
            own = replace(chosen, method=method)
            fitted = fit_machine(own, config, room, budget, choice.shares)
        if not all_agree(ranks, fitted is not None):
            continue
        # Layers that passes read from files would be split in each pass.
        splits = chosen.weights.split and not sizes.weights.split
        if not all_agree(ranks, not (splits and fitted.memory.weights_file_bytes)):
            return None
        return replace(fitted, sizes=chosen, seconds_per_token=choice.seconds_per_token)
    return None


def _by_rule(
    sizes: ModelSizes, config: EngineConfig, room: Room, unsplit: Collection[str], ranks: Ranks
) -> Resolved:
    """Return the plan of a rule by bytes: split weights if something streams, a retrieval level if
    it fits.
    """
    split = with_split_unasked(sizes, config, room.device_bytes, unsplit)
    found = _first_that_drafts(split, config, room, ranks)
    # Layers in files would have to be split again in every pass, so do not split weights.
    in_files = split is not sizes and found.memory.weights_file_bytes > 0
    if all_agree(ranks, not in_files):
        return found
    return _first_that_drafts(replace(split, layouts=sizes.layouts), config, room, ranks)


def _first_that_drafts(
    sizes: ModelSizes, config: EngineConfig, room: Room, ranks: Ranks
) -> Resolved:
    """Return the first of `_variants` for which all ranks have room for a retrieval level, or else
    the first that fits.
    """
    fitting = mine = None
    refused: list[tuple[DoesNotFitError, ModelSizes]] = []
    wrong: list[UsageError] = []
    for variant in _variants(sizes, ranks):
        plan = None
        try:
            plan = fit_machine(variant, config, room)
        except DoesNotFitError as error:
            refused.append((error, variant))
        except UsageError as error:
            wrong.append(error)
        # The smallest budget of all ranks; -1 if one of them has no room for its share.
        budget = ranks.least(-1 if plan is None else plan.budget)
        if budget >= 0 and budget != plan.budget:
            plan = fit_machine(variant, config, room, budget)
        if budget > 0:
            return plan
        mine = mine or plan
        fitting = fitting or (plan if budget == 0 else None)
    if found := fitting or mine:
        # If this is not what fits on all ranks, a rank that has no room raises the error.
        return found
    if wrong:
        raise wrong[0]
    raise _with_what_fits(*min(refused, key=lambda each: each[0].needed_bytes), config, room)


def _variants(sizes: ModelSizes, ranks: Ranks) -> Iterator[ModelSizes]:
    """Yield the sizes, then those that need less memory, as far as the settings leave that open:
    with drafts that are chains, not trees, and with draft copies in fewer bits. Several ranks have
    equally many: they do not change trees to chains, since some drafters are on the first rank
    alone.
    """
    method = sizes.method.with_smaller_copies
    for each in [sizes] if method is None else [sizes, replace(sizes, method=method)]:
        yield each
        if ranks.count == 1 and (chains := each.drafting_chains) is not None:
            yield chains


def fit_machine(
    sizes: ModelSizes,
    config: EngineConfig,
    room: Room,
    most_budget: int | None = None,
    shares: ProcessorShares | None = None,
) -> Resolved:
    """Place a model in device memory, host memory, files, and with the processor.

    most_budget: the most tokens that the retrieval cache may have
    shares: what the processor computes; None for what the settings say
    Raises UsageError or DoesNotFitError.
    """
    placement = config.placement
    if placement is not None and placement.expert_slots and config.host_compute != AUTO:
        # Pools have the place of experts that are on the device without them.
        placement = None
    fitted = fit_device(sizes, room.device_bytes, placement, most_budget)
    memory = fitted.memory
    if shares is None and config.host_compute != AUTO:
        shares = ProcessorShares.asked(config.host_compute, sizes.weights)
    if shares is not None and not fitted.budget:
        memory = shares.with_streamed_layers(memory)
    memory = room.with_files(memory)
    if shares is not None:
        memory = shares.placed_on_processor(memory, room)
    return replace(fitted, memory=memory)


def _with_what_fits(
    error: DoesNotFitError, sizes: ModelSizes, config: EngineConfig, room: Room
) -> DoesNotFitError:
    """Return the error extended by what would fit."""
    if config.placement is not None:
        return error
    without_budget = replace(sizes.method, budget=None)

    def refusal(context: int) -> DoesNotFitError | None:
        shorter = replace(sizes, max_context=context, method=without_budget)
        try:
            fit_machine(shorter, config, room)
        except DoesNotFitError as error:
            return error
        return None

    return with_what_fits(error, sizes.max_context, refusal, sizes.method.budget)
