"""What a plan is made from, and whether a head that may be left out drafts."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import inf

from triforce_core.loading.layer_source import Readable, ReadableDrafter
from triforce_core.model.checkpoints.mtp import MtpHead
from triforce_core.model.sharing.share import Pieces
from triforce_core.plan.by_time import Whole
from triforce_core.plan.fitting import Resolved
from triforce_core.plan.formats import storable_pieces, usable_pieces, with_asked_formats
from triforce_core.plan.machine import Room
from triforce_core.plan.resolve import fits_by_rule, resolve
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import MTP, EngineConfig
from triforce_offload.machine.profiles import Hardware
from triforce_offload.ranks import Ranks, all_agree


@dataclass(frozen=True)
class PlanInputs:
    """What a plan of a model is made from, but for its drafter.

    sizes: of this rank's share of the model, without a drafter and in no formats yet
    room: memory that this rank may take
    pieces: of its quantised matrices. unsplit: its matrices that cannot be split
    hardware: rates of the device, if they are known
    whole: the whole model and its whole drafter; None if this rank has all of it
    """

    sizes: ModelSizes
    config: EngineConfig
    room: Room
    pieces: Pieces
    unsplit: Collection[str]
    hardware: Hardware | None
    ranks: Ranks
    whole: tuple[Readable, ReadableDrafter | None] | None

    def sizes_with(self, drafter: ReadableDrafter | None) -> ModelSizes:
        """Return the sizes with a drafter, in the formats that the settings ask for."""
        sizes = _of_drafter(self.sizes, drafter)
        return with_asked_formats(sizes, self.config, self.pieces, self.room, self.unsplit)

    def plan(self, drafter: ReadableDrafter | None) -> Resolved:
        """Return the plan with a drafter. Raises UsageError, DoesNotFitError or RankError."""
        return resolve(
            self.sizes_with(drafter),
            self.config,
            self.room,
            self.pieces,
            self.unsplit,
            hardware=self.hardware,
            whole=self._whole(with_drafter=drafter is not None) if self.whole else None,
            ranks=self.ranks,
        )

    def all_fit(self, drafter: ReadableDrafter | None) -> bool:
        """Return whether the shares of all ranks fit with a drafter. Raises UsageError or
        RankError.
        """
        fits = fits_by_rule(self.sizes_with(drafter), self.config, self.room, self.unsplit)
        return all_agree(self.ranks, fits)

    def _whole(self, *, with_drafter: bool) -> Whole:
        """Return the model of which ranks have shares."""
        checkpoint, drafter = self.whole
        pieces = storable_pieces(checkpoint.pieces, self.sizes.dtype, self.sizes.device)
        sizes = _of_drafter(self.sizes, drafter if with_drafter else None)
        return Whole(checkpoint.config, sizes.drafter, pieces, sizes.drafter_pieces)


def plan_with_drafter(
    inputs: PlanInputs, drafter: ReadableDrafter | None
) -> tuple[Resolved, ReadableDrafter | None]:
    """Return the plan and the drafter. An MTP head that was not asked for is left out if the plan
    without it is faster; or, with a warning, if one of several ranks that share the model has no
    room for its part.

    Raises UsageError, DoesNotFitError or RankError.
    """
    ranks, may_leave_out = inputs.ranks, may_be_left_out(drafter, inputs.config)
    if may_leave_out and ranks.count > 1 and not inputs.all_fit(drafter):
        if not ranks.index:
            say_that_it_is_left_out()
        return inputs.plan(None), None
    chosen = inputs.plan(drafter)
    if may_leave_out and chosen.seconds_per_token:
        # Its memory may be worth more than its drafts.
        without = inputs.plan(None)
        if (without.seconds_per_token or inf) < chosen.seconds_per_token:
            return replace(without, leaves_head_out=True), None
    return chosen, drafter


def may_be_left_out(drafter: ReadableDrafter | None, config: EngineConfig) -> bool:
    """Whether a drafter is the model's own head, and nobody asked for it."""
    return isinstance(drafter, MtpHead) and str(config.method.draft) != MTP


def say_that_it_is_left_out() -> None:
    """Warn that an MTP head does not draft."""
    warnings.warn(
        "the model does not fit together with its MTP head, so n-grams draft",
        RuntimeWarning,
        stacklevel=3,
    )


def _of_drafter(sizes: ModelSizes, drafter: ReadableDrafter | None) -> ModelSizes:
    """Return the sizes with a draft model or a head."""
    if drafter is None:
        return sizes
    config, pieces = drafter.config, storable_pieces(drafter.pieces, sizes.dtype, sizes.device)
    if not config.joins:
        config = config.as_drafter
        pieces = usable_pieces(pieces, config, sizes.dtype, sizes.device)
    return replace(sizes, drafter=config, drafter_pieces=pieces)
