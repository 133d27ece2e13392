"""Placing a model within a device: a simple rule, weights first, then KV blocks."""

from __future__ import annotations

import math
from bisect import bisect_left

from triforce_offload.errors import DoesNotFitError
from triforce_offload.plan.memory_plan import MemoryPlan, Where
from triforce_offload.plan.placement import KV_SLOTS, STAGING_SLOTS, WEIGHT_SLOTS, Placement
from triforce_offload.plan.requirements import Requirements

# What pools of experts leave as it was: only experts are the less on the device for them.
_KEPT_WITH_POOLS = (
    *("embedding_resident", "resident_kv_blocks", "reclaimed_kv_blocks"),
    *("weight_slots", "kv_slots", "staging_slots"),
)
# A link brings one block while a pass attends to this many blocks on the device: a card's memory is
# about 40 times as fast as its link, a split block is read three or four times, and kernels are
# launched for it.
_BLOCKS_WHILE_ONE_COMES = 8


def place(needs: Requirements, limit_bytes: int) -> MemoryPlan:
    """Return the plan of a model and its longest context within `limit_bytes` of the device.

    Raises DoesNotFitError, with the size of the smallest placement, if even that does not fit.
    """
    everything = _everything(needs)
    if everything.device_bytes <= limit_bytes:
        return everything
    streamed = 0
    # Either the first parts of all layers are on the device, or none: the high bits, with which the
    # whole model drafts, or all but the experts. Draft copies are of whole layers, so with them
    # nothing of a streamed layer is on the device twice.
    last = needs.low_bytes or (() if needs.copy_bytes else needs.expert_bytes)
    if last and _least(needs, needs.layers, parted=True).device_bytes > limit_bytes:
        last = ()
    least = _least(needs, streamed, parted=bool(last))
    while (spare := limit_bytes - least.device_bytes) < 0:
        if streamed == needs.layers:
            raise DoesNotFitError(
                f"device memory for {needs.context_tokens} tokens of context with everything "
                "streamed",
                min(plan.device_bytes for plan in _smallest(needs)),
                limit_bytes,
                "give more device memory",
            )
        # At most half of the layers that the missing bytes require: no layer frees more than the
        # largest one, but which layers stream changes too.
        largest = max(last or needs.layer_bytes)
        streamed += max(1, -spare // (2 * largest))
        streamed = min(streamed, needs.layers)
        least = _least(needs, streamed, parted=bool(last))
    embedding_resident = needs.embedding_bytes <= spare
    if embedding_resident:
        spare -= needs.embedding_bytes
    block = needs.kv.block_bytes
    resident, reclaimed = _blocks(needs, spare)
    # A layer's blocks on the device come before those that stream: slots receive what the link
    # brings meanwhile.
    ahead = _slots_ahead(needs, resident + reclaimed)
    if ahead := min(ahead, resident * block // needs.kv.slot_bytes):
        resident, reclaimed = _blocks(needs, spare - ahead * needs.kv.slot_bytes)
    return least.placed(
        kv_slots=least.placement.kv_slots + ahead,
        embedding_resident=embedding_resident,
        resident_kv_blocks=resident,
        reclaimed_kv_blocks=reclaimed,
    )


def _blocks(needs: Requirements, spare: int) -> tuple[int, int]:
    """Count the KV blocks that fit in `spare` bytes, and those that fit in the prefill workspace
    once prefill is done.
    """
    block = needs.kv.block_bytes
    resident = min(spare // block, needs.kv_blocks)
    # Only one of several sequences is prefilled at any time.
    workspace = 0
    if needs.sequences == 1:
        workspace = (
            spare
            - resident * block
            + max(0, needs.prefill_workspace_bytes - needs.pass_workspace_bytes)
        )
    return resident, min(workspace // block, needs.kv_blocks - resident)


def _slots_ahead(needs: Requirements, kept: int) -> int:
    """Count the slots to add to KV_SLOTS if `kept` blocks are on the device and others stream."""
    layers = needs.kv.layers
    if not layers or kept < layers:
        return 0
    streamed = (needs.kv_blocks - kept) / layers
    return math.ceil(min(streamed, kept / layers / _BLOCKS_WHILE_ONE_COMES))


def least_to_draft(needs: Requirements) -> int:
    """Return the smallest device memory with which a retrieval level has every layer there: itself,
    its high bits, or a draft copy.
    """
    plans = _smallest(needs)
    if needs.low_bytes:
        plans.append(_least(needs, needs.layers, parted=True))
    return min(plan.device_bytes for plan in plans if plan.can_draft)


def _smallest(needs: Requirements) -> list[MemoryPlan]:
    """Return the plan with all on the device, and the smallest for each number of layers that
    stream.
    """
    return [_everything(needs), *(_least(needs, count) for count in range(needs.layers + 1))]


def _everything(needs: Requirements) -> MemoryPlan:
    """Return the plan with all on the device. Split KV gets slots for blocks that do not split."""
    slots = int(needs.kv.split)
    copies = _copied(needs, ())
    return MemoryPlan(
        needs, Placement((), True, needs.kv_blocks, 0, slots, slots, copied_layers=copies)
    )


def _least(needs: Requirements, streamed: int, *, parted: bool = False) -> MemoryPlan:
    """Return the smallest plan that streams `streamed` layers; if `parted`, their low bits, at most
    of all layers that have any, or their experts.
    """
    kv_slots, staging_slots = (KV_SLOTS, STAGING_SLOTS) if needs.kv_blocks else (0, 0)
    split = parted and bool(needs.low_bytes)
    may = [i for i in range(needs.layers) if not split or needs.low_bytes[i]]
    layers = tuple(may[i] for i in spread(min(streamed, len(may)), len(may)))
    placement = Placement(
        layers,
        False,
        0,
        min(WEIGHT_SLOTS, len(layers)),
        kv_slots,
        staging_slots,
        copied_layers=_copied(needs, () if split else layers),
        split_layers=layers if split else (),
        expert_layers=layers if parted and not split else (),
    )
    return MemoryPlan(needs, placement)


def _copied(needs: Requirements, streamed: tuple[int, ...]) -> tuple[int, ...]:
    if not needs.copy_bytes:
        return ()
    return tuple(range(needs.layers)) if needs.copies_all else streamed


def place_on_host(plan: MemoryPlan, limit_bytes: int) -> MemoryPlan:
    """Return the plan with as many streamed layers on the host as fit in `limit_bytes`; passes read
    the others from files. If even the plan with all of them in files does not fit, return that
    plan.
    """
    whole = [i for i, layer in enumerate(plan.layers) if layer.where in (Where.HOST, Where.FILE)]
    for count in range(len(plan.placement.file_layers), len(whole) + 1):
        in_files = tuple(whole[i] for i in spread(count, len(whole))) if count else ()
        apart = tuple(i for i in plan.placement.expert_layers if i not in in_files)
        placed = plan.placed(file_layers=in_files, expert_layers=apart)
        if placed.host_bytes <= limit_bytes:
            break
    return placed


def for_processor(plan: MemoryPlan) -> tuple[int, ...]:
    """Return the layers that the processor may compute: those in host memory, whole or their
    experts.
    """
    whole = (Where.HOST, Where.PROCESSOR)
    return tuple(i for i, layer in enumerate(plan.layers) if layer.where in whole)


def place_on_processor(plan: MemoryPlan, count: int) -> MemoryPlan:
    """Return the plan in which the processor computes `count` of the layers that it may, evenly
    spaced, so that the link brings others meanwhile.
    """
    whole = for_processor(plan)
    chosen = spread(count, len(whole)) if count else ()
    layers = tuple(whole[i] for i in chosen)
    return plan.placed(processor_layers=layers, expert_slots=0)


def with_kv_instead(plan: MemoryPlan, more: int) -> MemoryPlan:
    """Return the plan in which `more` further layers stream, and KV blocks have their place on the
    device: for a processor that computes these layers faster than the KV crosses. It takes no more
    device memory. Return the plan itself if it has copies of layers, split layers, layers in files
    or with the processor, or if nothing is gained.
    """
    needs, placement = plan.requirements, plan.placement
    count = len(placement.streamed_layers) + more
    fixed = placement.copied_layers or placement.split_layers or placement.file_layers
    fixed = fixed or placement.processor_layers
    if fixed or not more or count > needs.layers:
        return plan
    layers = spread(count, needs.layers)
    changed = plan.placed(
        streamed_layers=layers,
        weight_slots=max(placement.weight_slots, min(WEIGHT_SLOTS, count)),
        expert_layers=() if _whole(plan) else layers,
    )
    blocks = max(0, plan.device_bytes - changed.device_bytes) // needs.kv.block_bytes
    if not blocks:
        return plan
    resident = min(needs.kv_blocks, plan.kv.resident + blocks)
    reclaimed = min(placement.reclaimed_kv_blocks, needs.kv_blocks - resident)
    return changed.placed(resident_kv_blocks=resident, reclaimed_kv_blocks=reclaimed)


def with_expert_pools(
    plan: MemoryPlan, limit_bytes: int, like: Placement | None = None
) -> MemoryPlan:
    """Return the plan in which the processor computes experts of every layer, and each layer has a
    pool on the device of those that were used last, of equally many experts. Return the plan itself
    if no experts are away, if a pool has no room, or if experts are not stored one by one.

    limit_bytes: bytes of the device
    like: a placement with pools whose slots, KV and embedding the plan is to have
    """
    needs, like = plan.requirements, like or plan.placement
    layers = tuple(i for i, nbytes in enumerate(needs.expert_bytes) if nbytes)
    sizes = [needs.experts[layer] for layer in layers]
    if not (like.expert_layers and all(sizes)) or plan.placement.file_layers:
        return plan
    kept = {name: getattr(like, name) for name in _KEPT_WITH_POOLS}
    placed = plan.placed(
        streamed_layers=layers, expert_layers=layers, processor_layers=layers, **kept
    )
    spare = limit_bytes - placed.device_bytes

    def fits(slots: int) -> bool:
        return sum(each.pool_bytes(slots) for each in sizes) <= spare

    slots = bisect_left(
        range(1, min(each.count for each in sizes)), True, key=lambda n: not fits(n)
    )
    return placed.placed(expert_slots=slots) if slots else plan


def layers_for_kv(plan: MemoryPlan) -> set[int]:
    """Return numbers of further layers that might stream for the KV to stay on the device: none, as
    many as all KV needs, and half of these.
    """
    needs, placement = plan.requirements, plan.placement
    sizes = needs.layer_bytes if _whole(plan) else needs.expert_bytes
    needed = math.ceil(plan.kv.away * plan.kv.shape.block_bytes / max(sizes))
    # Layers that stream need slots, if none did before.
    needed += WEIGHT_SLOTS - min(WEIGHT_SLOTS, placement.weight_slots)
    most = min(needs.layers - len(placement.streamed_layers), needed)
    return {0, most // 2, most} if plan.kv.away else {0}


def _whole(plan: MemoryPlan) -> bool:
    """Whether further layers would stream as a whole, not their experts alone."""
    placement = plan.placement
    already = bool(placement.streamed_layers) and not placement.expert_layers
    return already or not plan.requirements.expert_bytes


def spread(count: int, layers: int) -> tuple[int, ...]:
    """Return `count` of `layers` layers, evenly spaced, so that the link never rests for long."""
    return tuple((2 * i + 1) * layers // (2 * count) for i in range(count))


def share_blocks(blocks: int, layers: int) -> tuple[int, ...]:
    """Divide `blocks` resident blocks among the layers, so that counts differ by at most one."""
    return tuple(blocks // layers + (layer < blocks % layers) for layer in range(layers))
