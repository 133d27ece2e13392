"""What a request reports: one nested dict, the same in Python and in --stats FILE."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
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
from triforce_offload.runtime import Runtime

# Draft tokens of which a share says something. Fewer are counted.
LEAST_EXAMINED = 20


class Clock:
    """Seconds of a request's phases, and what crossed the link in them. The first phase, prefill,
    begins when it is made; it lasts until the first new token.
    """

    def __init__(self, link: Link, load: float) -> None:
        """load: seconds that loading took."""
        self.load = load
        self.prefill = self.decode = 0.0
        self.prefill_link = self.decode_link = LinkCounters()
        self._link = link
        self._began, self._before = time.perf_counter(), link.counters()

    def end_prefill(self) -> None:
        self.prefill, self.prefill_link = self._phase()

    def end_decode(self) -> None:
        self.decode, self.decode_link = self._phase()

    def fail(self) -> None:
        """Ends what is under way. A device that hangs, or failed, does not say what came."""
        if self.decode:
            # It is what follows the last token that failed.
            return
        seconds, carried = time.perf_counter() - self._began, LinkCounters()
        with suppress(LinkError, RuntimeError):
            carried = self._link.counters() - self._before
        if self.prefill:
            self.decode, self.decode_link = seconds, carried
        else:
            self.prefill, self.prefill_link = seconds, carried

    def _phase(self) -> tuple[float, LinkCounters]:
        """Seconds and bytes of the phase that ends here. The next begins."""
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
    """Seconds, link, memory and placement. Decode figures cover decoding alone: the first new token
    comes from prefill, the others from passes. Rates are None when no pass was made, or nothing
    crossed the link, to tell them from.

    counted: passes of the request alone; tally: of the drafts that they verified

    What crossed the link is what really did, so it holds the head of a pass that was begun and not
    needed after an end of text; floor_seconds_per_pass is of the passes that were made.
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
        # Of a run that fails the last pass may have been made for nothing.
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
    }


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
    return {
        **plan.layer_counts,
        "embedding_resident": plan.placement.embedding_resident,
        "block_tokens": kv.shape.block_tokens,
        "resident_kv_layers": sum(resident == whole for resident, whole in blocks),
        "resident_kv_blocks": sum(resident for resident, _ in blocks),
        "kv_blocks": sum(whole for _, whole in blocks),
    }


def bits_per_number(models: Models) -> dict[str, Any]:
    """Bits of each number, as weights of layers and KV are stored, as they cross the link in passes
    and as the retrieval model reads them; None where nothing does.
    """
    plan, config = models.runtime.plan, models.target.config
    kv, high_bits = plan.kv, models.reads_high_bits
    numbers = [sum(map(prod, spec.shapes(config.hidden).values())) for spec in config.layers]

    def bits(nbytes: Callable[[LayerPlan], int]) -> float | None:
        """Over the layers of which there are any bytes."""
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
    """What one of several ranks had of a request, from when its prompt was read."""
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
        "int4_layers": runtime.plan.layer_counts["int4_layers"],
        "checksum": context.checksum,
    }


def _told(ask: Callable[[], float | None]) -> float | None:
    """What a device counted; None of one that hangs or failed."""
    with suppress(LinkError, RuntimeError):
        return ask()
    return None


def drafting_stats(
    models: Models, tallies: Tallies, cache: RetrievalCache | None
) -> dict[str, Any]:
    """What was drafted and how much of it held. Shares are None where nothing was drafted."""
    outer, inner, method = *tallies, models.method
    return {
        "levels": models.levels,
        "dropped": [asdict(dropped) for dropped in models.dropped],
        "accept": method.accept,
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
        },
        "retrieval": {
            "budget_tokens": cache.budget,
            "chunk_size": method.chunk_size,
            "policy": method.retrieval,
            "churn": _told(lambda: cache.churn),
            "bytes_read_in_place": _told(lambda: cache.bytes_read_in_place),
            "steps": inner.rounds,
            "reads_high_bits": models.reads_high_bits
            or bool(models.runtime.plan.placement.split_layers),
            "in_8_bits": models.rounds_kv,
        }
        if cache
        else None,
    }


def _histogram(tally: Tally) -> list[int]:
    """How many drafts had 0, 1, 2, ... tokens accepted."""
    lengths = tally.accepted_lengths
    return [lengths.get(i, 0) for i in range(max(lengths, default=-1) + 1)]
