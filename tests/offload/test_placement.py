"""The placement rule: weights first, then KV blocks, never more than there is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.kv.store import KVShape
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placement import KV_SLOTS, Placement
from triforce_offload.plan.placing import place, place_on_host, share_blocks, spread
from triforce_offload.plan.requirements import Requirements

GIB = 1 << 30


def test_slots_take_what_comes_while_blocks_on_the_device_are_read() -> None:
    """None where all of a layer streams or nothing does, few where little is kept."""
    demand = llama2_7b()
    slots = []
    for memory in range(17, 86):
        placement = place(demand, memory * GIB).placement
        assert MemoryPlan(demand, placement).device_bytes <= memory * GIB
        kept = (placement.resident_kv_blocks + placement.reclaimed_kv_blocks) / demand.layers
        left = demand.kv_blocks / demand.layers - kept
        if placement.resident_kv_blocks < demand.kv_blocks:
            assert placement.kv_slots >= KV_SLOTS
            assert placement.kv_slots - KV_SLOTS <= min(left + 1, kept / 8 + 2)
            slots.append(placement.kv_slots)
    assert slots[0] < max(slots)
    assert max(slots) > 8
    assert slots[-1] == KV_SLOTS == min(slots), "none stream"


def test_no_slots_are_added_where_nothing_streams_once_memory_is_lent() -> None:
    """They would take what keeps the last blocks from streaming."""
    demand = llama2_7b()
    whole = place(demand, 200 * GIB).placed(kv_slots=KV_SLOTS, staging_slots=2)
    for missing in (10, 40, 150):
        limit = whole.device_bytes - missing * demand.kv.block_bytes
        placement = place(demand, limit).placement
        lent = placement.reclaimed_kv_blocks
        assert lent
        assert placement.resident_kv_blocks + lent == demand.kv_blocks
        assert placement.kv_slots == KV_SLOTS


def llama2_7b(context: int = 131072) -> Requirements:
    return Requirements(
        layer_bytes=(405_000_000,) * 32,
        head_bytes=262_000_000,
        embedding_bytes=262_000_000,
        prefill_workspace_bytes=3 * GIB,
        pass_workspace_bytes=GIB // 2,
        kv=KVShape(32, 32, 128, 512, torch.float16),
        context_tokens=context,
        max_pass_tokens=1,
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(1, 40),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 3000),
    st.integers(0, 10**8),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_a_placement_fits_and_leaves_no_room_unused(
    layers, layer_bytes, head, embedding, context, limit, reading, passing
) -> None:
    kv = KVShape(layers, 2, 8, 16, torch.float32)
    sizes = (layer_bytes,) * layers
    demand = Requirements(sizes, head, embedding, reading, passing, kv, context, 1)
    try:
        placement = place(demand, limit).placement
    except DoesNotFitError as error:
        assert error.needed_bytes > limit == error.available_bytes
        assert place(demand, error.needed_bytes).placement.resident_kv_blocks >= 0
        return
    used = MemoryPlan(demand, placement).device_bytes
    assert used <= limit
    MemoryPlan(demand, placement).check(limit)
    assert len(placement.streamed_layers) == len(set(placement.streamed_layers)) <= layers
    lent = placement.reclaimed_kv_blocks
    assert placement.resident_kv_blocks + lent <= demand.kv_blocks
    if placement.resident_kv_blocks < demand.kv_blocks:
        # While a prompt is read, or if that is more in passes, no block more would fit.
        unclaimed = replace(placement, reclaimed_kv_blocks=0)
        assert MemoryPlan(demand, unclaimed).device_bytes + kv.block_bytes > limit
    if placement.resident_kv_blocks + lent < demand.kv_blocks:
        assert (
            MemoryPlan(replace(demand, prefill_workspace_bytes=0), placement).device_bytes
            + kv.block_bytes
            > limit
        )
    if placement.streamed_layers and placement.resident_kv_blocks:
        assert (
            limit - used + placement.resident_kv_blocks * kv.block_bytes < layer_bytes + embedding
        )
    moved = MemoryPlan(demand, placement).host_bytes + used
    assert moved >= layers * layer_bytes + demand.kv_blocks * kv.block_bytes + embedding


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(0, 10**8))
def test_layers_of_different_sizes_are_counted_as_they_are(sizes, limit) -> None:
    kv = KVShape(len(sizes), 2, 8, 16, torch.float32)
    demand = Requirements(tuple(sizes), 10**5, 10**4, 10**5, 10**5, kv, 500, 1)
    try:
        placement = place(demand, limit).placement
    except DoesNotFitError as error:
        place(demand, error.needed_bytes)
        return
    resident = [i for i in range(len(sizes)) if i not in placement.streamed_layers]
    weights = sum(sizes[i] for i in resident) + placement.weight_slots * max(sizes)
    used = MemoryPlan(demand, placement).device_bytes
    assert weights < used <= limit
    # Nothing else depends on where weights are.
    without = replace(placement, streamed_layers=(), weight_slots=0)
    assert MemoryPlan(demand, without).device_bytes - used == sum(sizes) - weights
    streamed = sum(sizes) - sum(sizes[i] for i in resident)
    assert (
        MemoryPlan(demand, placement).host_bytes - MemoryPlan(demand, without).host_bytes
        == streamed
    )


def test_llama2_7b_at_128k_on_24_gb_streams_kv_and_keeps_weights() -> None:
    placement = place(llama2_7b(), 22 * GIB).placement
    assert placement.streamed_layers == ()
    assert 0 < placement.resident_kv_blocks < llama2_7b().kv_blocks
    assert placement.kv_slots * llama2_7b().kv.block_bytes <= 256 << 20
    # What only reading needs holds blocks afterwards.
    assert placement.reclaimed_kv_blocks == (5 * GIB // 2) // llama2_7b().kv.block_bytes


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(DoesNotFitError, match=r"needs \d\S* GiB and 2 GiB is available"):
        place(llama2_7b(), 2 * GIB)


def test_layers_that_the_host_has_no_room_for_stay_in_their_files() -> None:
    demand = replace(llama2_7b(), context_tokens=4096)
    placement = place(demand, 8 * GIB).placement
    streamed = placement.streamed_layers
    assert len(streamed) > 10
    seen = []
    for gib in (1, 2, 4, 6, 8, 10, 16, 64):
        placed = place_on_host(MemoryPlan(demand, placement), gib * GIB).placement
        seen.append(len(placed.file_layers))
        assert set(placed.file_layers) <= set(streamed)
        assert replace(placed, file_layers=()) == placement
        if MemoryPlan(demand, placed).host_bytes > gib * GIB:
            assert placed.file_layers == streamed, "nothing less would do"
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == len(streamed)
    assert seen[-1] == 0
    with pytest.raises(UsageError, match="are not all streamed_layers"):
        replace(placement, streamed_layers=(1,), file_layers=(1, 2))
    with pytest.raises(UsageError, match="file_layers of a placement cannot be"):
        replace(placement, file_layers=[1])


def test_a_placement_without_slots_to_stream_through_is_refused() -> None:
    with pytest.raises(UsageError, match="weight slot"):
        MemoryPlan(llama2_7b(), Placement((0,), True, 10**6, 0, 0, 0)).check(10**15)
    with pytest.raises(UsageError, match="KV slots"):
        MemoryPlan(llama2_7b(), Placement((), True, 0, 0, 3, 0)).check(10**15)


@given(st.integers(1, 100), st.data())
def test_streamed_layers_are_spread_evenly(layers: int, data) -> None:
    count = data.draw(st.integers(1, layers))
    chosen = spread(count, layers)
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    assert len(set(chosen)) == count
    assert 0 <= chosen[0] <= chosen[-1] < layers
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(st.integers(0, 500), st.integers(1, 60))
def test_resident_blocks_are_shared_evenly(blocks: int, layers: int) -> None:
    shares = share_blocks(blocks, layers)
    assert sum(shares) == blocks
    assert max(shares) - min(shares) <= 1
