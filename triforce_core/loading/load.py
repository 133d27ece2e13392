"""Loading: from a checkpoint on disk to models on the device. Fails early if they do not fit."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import replace

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
from triforce_core.loading.plan_inputs import (
    PlanInputs,
    may_be_left_out,
    plan_with_drafter,
    say_that_it_is_left_out,
)
from triforce_core.model.checkpoints.drafters.eagle3 import Eagle3Checkpoint
from triforce_core.model.sharing.share import Share, mlp_unit
from triforce_core.plan.fitting import Resolved
from triforce_core.plan.formats import element_type, storable_pieces
from triforce_core.plan.machine import Room
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
from triforce_offload.ranks import Alone, Ranks


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
            # Several ranks decide together, before they read weights (`plan_with_drafter`).
            if ranks.count > 1 or not may_be_left_out(drafter, config):
                raise
            drafter = None
            say_that_it_is_left_out()
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
    share, whole = _share(checkpoint, ranks), None
    if share is not None:
        whole, checkpoint = (checkpoint, drafter), checkpoint.shared(share)
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
            checkpoint.config,
            dtype,
            max_context,
            config.method,
            config.block_tokens,
            device=describe(device, machine, dtype, link.copy_bytes, own_device=own_device),
            sequences=config.sequences,
        )
        pieces = storable_pieces(checkpoint.pieces, dtype, sizes.device)
        inputs = PlanInputs(sizes, config, room, pieces, unsplit, hardware, ranks, whole)
        memory = DeviceMemory(device, limit, inputs.sizes_with(drafter).stored_bytes)
        stack.callback(memory.close)
        room = replace(room, device_bytes=memory.available_bytes)
        chosen, drafter = plan_with_drafter(replace(inputs, room=room), drafter)
        if chosen.memory.weights_file_bytes or checkpoint.config.looks_up:
            # The files stay open as long as the models.
            checkpoint = checkpoint.reopened()
            stack.callback(checkpoint.close)
        link, tracer = _outfitted(link, host, config, chosen, emulated=room.emulated)
        execution = Execution(
            checkpoint, drafter, chosen, memory, host, ranks, share, progress, stack
        )
        return execution.models(link, tracer)


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
