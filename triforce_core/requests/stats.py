"""Statistics of a request: one nested dict, used in Python and in --stats FILE."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any

from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.models import Models
from triforce_core.decoding.drafters.retrieval import RetrievalCache
from triforce_core.decoding.levels import Tallies, Tally
from triforce_offload.errors import LinkError
from triforce_offload.kv.sequence import PassCounters
from triforce_offload.kv.store import KVStore
from triforce_offload.link.link import Link, LinkCounters
from triforce_offload.plan.memory_plan import LayerPlan, MemoryPlan
from triforce_offload.plan.placement import left_to_processor
from triforce_offload.runtime import Runtime
from triforce_offload.weights.expert_pool import PoolCounters

# Least number of examined draft tokens for which a share is meaningful. Of fewer, give the count.
LEAST_EXAMINED = 20


class Clock:
    """Time and link traffic of a request's phases, and what its passes found in pools of experts.
    The first phase, prefill, starts when the clock is created, and ends with the first new token.
    """

    def __init__(self, runtime: Runtime, load: float) -> None:
        """load: seconds that loading the model took"""
        link = runtime.link
        self.load = load
        self.prefill = self.decode = 0.0
        self.prefill_link = self.decode_link = LinkCounters()
        self._link = link
        self._pools = runtime.expert_pools
        self._pooled = self._pools.counters()
        self._began, self._before = time.perf_counter(), link.counters()

    def end_prefill(self) -> None:
        self.prefill, self.prefill_link = self._phase()

    @property
    def pools(self) -> PoolCounters:
        """What passes found in pools so far."""
        return self._pools.counters() - self._pooled

    def end_decode(self) -> None:
        self.decode, self.decode_link = self._phase()

    def fail(self) -> None:
        """End the current phase after a failure. A hung or failed device reports no traffic."""
        if self.decode:
            # The failure came after the last token.
            return
        seconds, carried = time.perf_counter() - self._began, LinkCounters()
        with suppress(LinkError, RuntimeError):
            carried = self._link.counters() - self._before
        if self.prefill:
            self.decode, self.decode_link = seconds, carried
        else:
            self.prefill, self.prefill_link = seconds, carried

    def _phase(self) -> tuple[float, LinkCounters]:
        """End the phase and start the next. Return the seconds and the traffic of the phase."""
        seconds = time.perf_counter() - self._began
        carried = self._link.counters() - self._before
        self._began, self._before = time.perf_counter(), self._link.counters()
        return seconds, carried


def request_stats(
    runtime: Runtime,
    kv: KVStore,
    counted: PassCounters,
    clock: Clock,
    tally: Tally,
    new_tokens: int,
) -> dict[str, Any]:
    """Return time, link traffic, memory and placement of a request.

    Decode figures cover decoding alone: the first new token comes from the prefill, the others from
    passes. Rates are None if there was no pass or no traffic.

    Link traffic includes every copy that was made, so also the first copies of a pass that was
    begun but not needed after an end-of-text token. floor_seconds_per_pass counts only passes that
    were completed.

    counted: counters of the request's passes
    tally: counters of the drafts that these passes verified
    """
    made, passed, needs = counted.passes, new_tokens - 1, runtime.plan.requirements
    return {
        "seconds": {
            "load": clock.load,
            "prefill": clock.prefill,
            "decode": clock.decode,
            "draft": tally.draft_seconds,
            "verify": tally.verify_seconds,
        },
        # If a run fails, its last pass may have yielded no token.
        "seconds_per_token": clock.decode / passed if made and passed else None,
        "passes": made,
        "tokens_per_pass": passed / made if made else None,
        "link": _link_stats(runtime.link, counted, clock),
        "memory": {
            "device_budget_bytes": runtime.memory.limit_bytes,
            "device_peak_bytes": runtime.memory.peak_bytes,
            "weights_bytes": needs.weights_bytes + needs.head_bytes + needs.embedding_bytes,
            "host_bytes": runtime.host.nbytes,
            "host_pageable_bytes": runtime.host.pageable_bytes,
        },
        "placement": _placement_stats(runtime.plan, kv),
        "experts": _pool_stats(runtime.plan.placement.expert_slots, clock.pools),
    }


def _pool_stats(slots: int, counted: PoolCounters) -> dict[str, Any] | None:
    if not slots:
        return None
    found, missing, nbytes = counted
    return {"slots": slots, "found": found, "missing": missing, "bytes_to_device": nbytes}


def _link_stats(link: Link, counted: PassCounters, clock: Clock) -> dict[str, Any]:
    made, carried, bandwidth = counted.passes, clock.decode_link, link.bandwidth
    if bandwidth is None and carried.busy_seconds:
        bandwidth = carried.bytes_to_device / carried.busy_seconds
    floor = counted.bytes_to_device / made / bandwidth if made and bandwidth else None
    return {
        "emulated": link.emulated,
        "bytes_to_device": carried.bytes_to_device,
        "bytes_to_host": carried.bytes_to_host,
        "busy_seconds": carried.busy_seconds,
        "bytes_of_passes": counted.bytes_to_device,
        "bandwidth_gb_per_s": bandwidth and bandwidth / 1e9,
        "floor_seconds_per_pass": floor,
        "prefill_bytes_to_device": clock.prefill_link.bytes_to_device,
        "prefill_bytes_to_host": clock.prefill_link.bytes_to_host,
    }


def _placement_stats(plan: MemoryPlan, kv: KVStore) -> dict[str, Any]:
    """Return where the weights are, and the KV at this length."""
    layers = range(kv.shape.layers)
    blocks = [(kv.on_device(layer), len(kv.locations(layer))) for layer in layers]
    share = plan.kv.processor_share
    away = [len(kv.locations(layer)) - kv.first_away(layer) for layer in layers]
    return {
        **plan.layer_counts,
        "embedding_resident": plan.placement.embedding_resident,
        "block_tokens": kv.shape.block_tokens,
        "resident_kv_layers": sum(resident == whole for resident, whole in blocks),
        "resident_kv_blocks": sum(resident for resident, _ in blocks),
        "kv_blocks": sum(whole for _, whole in blocks),
        "processor_kv_blocks": sum(left_to_processor(share, max(0, each)) for each in away),
    }


def bits_per_number(models: Models) -> dict[str, Any]:
    """Return the bits per number of layer weights and of KV: as stored, as they cross the link in
    passes, and as the retrieval level reads them; None where there is nothing to count.
    """
    plan, config = models.runtime.plan, models.target.config
    kv, high_bits = plan.kv, models.reads_high_bits
    numbers = [sum(map(prod, spec.shapes(config.hidden).values())) for spec in config.layers]

    def bits(nbytes: Callable[[LayerPlan], int]) -> float | None:
        """Average over the layers for which `nbytes` is not 0."""
        read = [(nbytes(layer), count) for layer, count in zip(plan.layers, numbers, strict=True)]
        counted = sum(count for size, count in read if size)
        return 8 * sum(size for size, _ in read) / counted if counted else None

    return {
        "weights": {
            "stored": bits(lambda layer: layer.nbytes),
            "link": bits(lambda layer: layer.link_bytes),
            "drafted": bits(lambda layer: layer.draft_bytes(high_bits=high_bits))
            if models.budget
            else None,
        },
        "kv": {
            "stored": kv.shape.bits_per_number,
            "link": kv.shape.bits_per_number if kv.streamed else None,
            "drafted": (8 if models.rounds_kv else 8 * kv.shape.dtype.itemsize)
            if models.budget
            else None,
        },
    }


def rank_stats(runtime: Runtime, context: Context) -> dict[str, Any]:
    """Return one rank's statistics of a request since the end of its prefill."""
    carried = runtime.link.counters() - context.link_when_prefilled
    counted = context.sequence.counters - context.passes_when_prefilled
    return {
        "bytes_to_device": carried.bytes_to_device,
        "bytes_to_host": carried.bytes_to_host,
        "bytes_per_pass": counted.bytes_to_device / counted.passes if counted.passes else None,
        "device_budget_bytes": runtime.memory.limit_bytes,
        "device_peak_bytes": runtime.memory.peak_bytes,
        "host_bytes": runtime.host.nbytes,
        "resident_weight_layers": runtime.plan.layer_counts["resident_weight_layers"],
        "copied_layers": runtime.plan.layer_counts["copied_layers"],
        "checksum": context.checksum,
    }


def _told(ask: Callable[[], float | None]) -> float | None:
    """Return a counter of the device, or None if the device hangs or failed."""
    with suppress(LinkError, RuntimeError):
        return ask()
    return None


def drafting_stats(
    models: Models, tallies: Tallies, cache: RetrievalCache | None
) -> dict[str, Any]:
    """Return the statistics of drafts and their acceptance. Shares are None if there were no
    drafts.
    """
    outer, inner, method = *tallies, models.method
    return {
        "levels": models.levels,
        "accept": method.accept,
        "same_bits": models.same_bits,
        "acceptance": {
            "target": outer.acceptance,
            "retrieval": inner.acceptance,
            "accepted_lengths": _histogram(outer),
            "inner_accepted_lengths": _histogram(inner),
        },
        "draft_tokens": {
            "mean": outer.drafted / outer.rounds if outer.rounds else None,
            "inner_mean": inner.drafted / inner.rounds if inner.rounds else None,
            "examined": outer.examined,
            "inner_examined": inner.examined,
            "trees": outer.trees,
            "from_siblings": outer.from_siblings,
        },
        "retrieval": {
            "budget_tokens": cache.budget,
            "chunk_size": method.chunk_size,
            "churn": _told(lambda: cache.churn),
            "bytes_read_in_place": _told(lambda: cache.bytes_read_in_place),
            "steps": inner.rounds,
            "reads_high_bits": models.reads_high_bits
            or bool(models.runtime.plan.placement.split_layers),
            "in_8_bits": models.rounds_kv,
            "copy_bits": method.bits_of_copies if models.draft_copies else None,
        }
        if cache
        else None,
    }


def _histogram(tally: Tally) -> list[int]:
    """Return the number of drafts with 0, 1, 2, ... accepted tokens."""
    lengths = tally.accepted_lengths
    return [lengths.get(i, 0) for i in range(max(lengths, default=-1) + 1)]
