"""Loading: from a checkpoint on disk to models on the device. Fails early if they do not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch

from triforce_core.decoding.contexts.models import Models
from triforce_core.loading.devices import (
    TORCH_DTYPES,
    describe,
    open_link,
    rank_device,
    rates,
    set_threads,
)
from triforce_core.loading.execution import Execution, Progress
from triforce_core.loading.layer_source import Readable, ReadableDrafter, ReadableHead
from triforce_core.model.checkpoints.drafters.eagle3 import Eagle3Checkpoint
from triforce_core.model.checkpoints.mtp import MtpHead
from triforce_core.model.config import ModelConfig
from triforce_core.model.sharing.share import Share, mlp_unit
from triforce_core.plan.by_time import Whole
from triforce_core.plan.choice import Peers
from triforce_core.plan.fitting import Resolved
from triforce_core.plan.formats import element_type, storable_pieces, with_asked_formats
from triforce_core.plan.machine import Room
from triforce_core.plan.resolve import resolve
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import MTP, EngineConfig
from triforce_offload.errors import CannotSplitError, DoesNotFitError, UsageError
from triforce_offload.link.link import Link
from triforce_offload.link.staging import StagedLink
from triforce_offload.link.trace import NoTrace, Trace, TracedLink, Tracer
from triforce_offload.memory.available import available_host_bytes
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.memory.host import HostMemory
from triforce_offload.plan.memory_plan import READ_AHEAD
from triforce_offload.ranks import Alone, Call, Ranks


def load(
    checkpoint: Readable,
    config: EngineConfig,
    max_context: int,
    drafter: ReadableDrafter | None,
    progress: Progress,
    ranks: Ranks | None = None,
) -> Models:
    """Resolve a plan for the models and execute it.

    max_context: number of tokens of the longest sequence
    ranks: the ranks that share the model; this one loads its share

    Raises UsageError, DoesNotFitError before any weights are read, CheckpointError or RankError.
    """
    ranks, unsplit = ranks or Alone(), frozenset[str]()
    if drafter is None and config.method.may_use_head:
        drafter = _head(checkpoint, config)
    elif drafter is not None and drafter.config.joins:
        drafter = _in_own_files(drafter, checkpoint, config, ranks)
    while True:
        try:
            return _load(checkpoint, config, max_context, drafter, progress, ranks, unsplit)
        except DoesNotFitError:
            # Several ranks decide together, before they read weights (`_with_drafter`).
            if ranks.count > 1 or not _may_leave_out(drafter, config):
                raise
            drafter = None
            _say_that_it_is_left_out()
        except CannotSplitError as error:
            # All ranks start over together.
            unsplit |= error.names
            if not ranks.index:
                _say_what_is_not_split(unsplit if error.names else error.names)


def _say_what_is_not_split(names: frozenset[str]) -> None:
    """names: of this rank's matrices so far; empty if another rank found some"""
    which = min(names, default="a matrix of another GPU")
    others = f"{len(names)} matrices are not split, {which} among them"
    warnings.warn(
        f"{others if len(names) > 1 else f'{which} is not split'}, with more numbers far below "
        "others than the split format has room for; the model is read once more",
        RuntimeWarning,
        stacklevel=3,
    )


def _load(
    checkpoint: Readable,
    config: EngineConfig,
    max_context: int,
    drafter: ReadableDrafter | None,
    progress: Progress,
    ranks: Ranks,
    unsplit: frozenset[str],
) -> Models:
    """`load` once. Raises CannotSplitError for matrices that must be added to `unsplit`."""
    machine = config.machine
    device, own_device = rank_device(machine, ranks)
    set_threads(machine, ranks)
    share, whole, with_head = _share(checkpoint, ranks), checkpoint, drafter
    if share is not None:
        checkpoint = checkpoint.shared(share)
        if drafter is not None and drafter.config.joins and drafter.config.joins.divided:
            drafter = drafter.shared(share)
    stored = checkpoint.stored_dtype
    dtype = TORCH_DTYPES[element_type(config.dtype, stored, gpu=device.type == "cuda")]
    with ExitStack() as stack:
        # Opening a GPU's link measures its bandwidth, so do it before the memory cap is set.
        link, host = open_link(machine, device)
        stack.callback(lambda: link.close())
        ranks.meet(device, own_device=own_device)
        hardware = None if config.placement else rates(device, dtype, link, ranks)
        room, limit = _room(checkpoint, config, device, ranks, share, own_device=own_device)
        sizes = ModelSizes(
            *(checkpoint.config, dtype, max_context, config.method, config.block_tokens),
            device=describe(device, machine, dtype, link.copy_bytes, own_device=own_device),
            sequences=config.sequences,
        )
        pieces = storable_pieces(checkpoint.pieces, dtype, sizes.device)

        def asked(drafter: ReadableDrafter | None) -> ModelSizes:
            with_drafter = _of_drafter(sizes, drafter)
            return with_asked_formats(with_drafter, config, pieces, room, unsplit)

        memory = DeviceMemory(device, limit, asked(drafter).stored_bytes)
        stack.callback(memory.close)

        def resolved(drafter: ReadableDrafter | None, peers: Peers) -> Resolved:
            available = replace(room, device_bytes=memory.available_bytes)
            return resolve(
                *(asked(drafter), config, available, pieces, unsplit),
                hardware=hardware,
                whole=_whole(sizes, whole, drafter and with_head) if share else None,
                peers=peers,
            )

        chosen, drafter = _with_drafter(resolved, drafter, config, ranks)
        if chosen.memory.weights_file_bytes or checkpoint.config.looks_up:
            # The files stay open as long as the models.
            checkpoint = checkpoint.reopened()
            stack.callback(checkpoint.close)
        link, tracer = _outfitted(link, host, config, chosen, emulated=room.emulated)
        execution = Execution(
            checkpoint, drafter, chosen, memory, host, ranks, share, progress, stack
        )
        return execution.models(link, tracer)


def _with_drafter(
    resolved: Callable[[ReadableDrafter | None, Peers], Resolved],
    drafter: ReadableDrafter | None,
    config: EngineConfig,
    ranks: Ranks,
) -> tuple[Resolved, ReadableDrafter | None]:
    """Return the plan and the drafter. An MTP head that was not asked for is left out if the plan
    without it is faster; or, with a warning, if one of several ranks that share the model has no
    room for its part.

    resolved: returns the plan with a drafter
    Raises UsageError, DoesNotFitError or RankError.
    """
    chosen = None
    if ranks.count > 1 and _may_leave_out(drafter, config):
        chosen = _if_all_fit(partial(resolved, drafter), ranks)
        if chosen is None:
            drafter = None
            if not ranks.index:
                _say_that_it_is_left_out()
    chosen = chosen or resolved(drafter, ranks)
    if _may_leave_out(drafter, config) and chosen.seconds_per_token:
        # Its memory may be worth more than its drafts.
        without = resolved(None, ranks)
        if (without.seconds_per_token or inf) < chosen.seconds_per_token:
            return without, None
    return chosen, drafter


def _may_leave_out(drafter: ReadableDrafter | None, config: EngineConfig) -> bool:
    return isinstance(drafter, MtpHead) and str(config.method.draft) != MTP


def _say_that_it_is_left_out() -> None:
    warnings.warn(
        "the model does not fit together with its MTP head, so n-grams draft",
        RuntimeWarning,
        stacklevel=3,
    )


class _NoRoomElsewhereError(Exception):
    """Another rank has no room for its share."""


@dataclass(frozen=True)
class _Watching:
    """Ranks whose `least` is negative if the share of one of them does not fit."""

    ranks: Ranks

    @property
    def index(self) -> int:
        return self.ranks.index

    def least(self, number: int) -> int:
        """Ranks.least. Raises _NoRoomElsewhereError."""
        if (least := self.ranks.least(number)) < 0:
            raise _NoRoomElsewhereError
        return least

    def of_first(self, message: Call) -> Call:
        """Ranks.of_first."""
        return self.ranks.of_first(message)


def _if_all_fit(resolved: Callable[[Peers], Resolved], ranks: Ranks) -> Resolved | None:
    """Return the plan of `resolved`; None on all ranks if one of them has no room.

    Raises UsageError or RankError.
    """
    peers = _Watching(ranks)
    try:
        found = resolved(peers)
        peers.least(0)
    except _NoRoomElsewhereError:
        return None
    except DoesNotFitError:
        # Whatever the others agree on next, they learn that one has no room.
        ranks.least(-1)
        return None
    return found


def _head(checkpoint: Readable, config: EngineConfig) -> ReadableHead | None:
    """Return the model's MTP head, None if it cannot draft and need not. Raises UsageError."""
    head = getattr(checkpoint, "mtp_head", None)
    why = "the model's files have no MTP head that is known"
    if head is not None and (why := _refusal(head, config)) is None:
        return head
    if str(config.method.draft) == MTP:
        raise UsageError(f"--draft mtp: {why}; use --draft ngram")
    return None


def _refusal(head: ReadableHead, config: EngineConfig) -> str | None:
    """Return why a head cannot draft as the settings ask, None if it can."""
    if config.method.fixed_tree is None or config.method.method != "triforce":
        return None
    name = head.config.joins.in_words
    return f"{name}s draft for a retrieval level without trees (--method speculative has trees)"


def _in_own_files(
    head: ReadableHead, checkpoint: Readable, config: EngineConfig, ranks: Ranks
) -> ReadableHead:
    """Return a head in files of its own as these ranks have it. Raises UsageError if it cannot
    draft.
    """
    if why := _refusal(head, config):
        raise UsageError(f"--draft: {why}")
    if isinstance(head, Eagle3Checkpoint):
        return head.on_ranks(ranks.count, checkpoint)
    return head


def _of_drafter(sizes: ModelSizes, drafter: ReadableDrafter | None) -> ModelSizes:
    """Return the sizes with a draft model or a head."""
    if drafter is None:
        return sizes
    config = _as_drafter(drafter.config)
    own = None
    if config.joins:
        own = storable_pieces(drafter.pieces, sizes.dtype, sizes.device)
    return replace(sizes, drafter=config, head_pieces=own)


def _whole(sizes: ModelSizes, checkpoint: Readable, drafter: ReadableDrafter | None) -> Whole:
    """Return the model of which ranks have shares. checkpoint, drafter: all of them"""
    pieces = storable_pieces(checkpoint.pieces, sizes.dtype, sizes.device)
    sizes = _of_drafter(sizes, drafter)
    return Whole(checkpoint.config, sizes.drafter, pieces, sizes.head_pieces)


def _as_drafter(config: ModelConfig) -> ModelConfig:
    return config if config.joins else config.as_drafter


def _outfitted(
    link: Link, host: HostMemory, config: EngineConfig, chosen: Resolved, *, emulated: bool
) -> tuple[Link, Tracer]:
    """Return the link as runs use it: through staging buffers where copies need them, and traced if
    the settings say so.
    """
    if not emulated or chosen.memory.weights_file_bytes:
        reading = (READ_AHEAD, max(chosen.memory.requirements.layer_bytes))
        link = StagedLink(link, host, reading=reading)
    if not config.trace:
        return link, NoTrace()
    trace = Trace(link)
    return TracedLink(link, trace), trace


def _share(checkpoint: Readable, ranks: Ranks) -> Share | None:
    """Return this rank's share of the model, None for the whole model."""
    if ranks.count == 1:
        return None
    unit = mlp_unit(checkpoint.config, checkpoint.pieces)
    return Share.of(checkpoint.config, ranks.index, ranks.count, unit)


def _room(
    checkpoint: Readable,
    config: EngineConfig,
    device: torch.device,
    ranks: Ranks,
    share: Share | None,
    *,
    own_device: bool,
) -> tuple[Room, int | None]:
    """Return the memory that this rank may take, and the cap of its device memory (None for no
    cap).

    Raises UsageError.
    """
    machine, emulated = config.machine, device.type == "cpu"
    # A share of the machine's free memory, measured before any rank takes some.
    host_share = share.of_machine(ranks.local, ranks.here) if share else 1.0
    host_bytes = int(available_host_bytes() * host_share)
    limit = machine.device_memory
    if limit is None and not own_device:
        if not emulated:
            raise UsageError("ranks that share a GPU need --device-memory, of each")
        limit = host_bytes
    room = Room(
        host_bytes if limit is None else limit,
        host_bytes,
        machine.host_memory and int(machine.host_memory * host_share),
        emulated=emulated,
        reads_files=bool(checkpoint.files),
    )
    return room, limit
