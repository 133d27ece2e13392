"""What a request reports: one nested dict, the same in Python and in --stats FILE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from offload.link.link import LinkCounters
from offload.runtime import Runtime, Session
from triforce_core.decoding.autoregressive import Decoder
from triforce_core.decoding.drafting import Drafting
from triforce_core.decoding.levels import Tally


@dataclass
class Clock:
    """Seconds of a request's phases, and what crossed the link in them."""

    load: float
    prefill: float = 0.0
    decode: float = 0.0
    prefill_link: LinkCounters = field(default_factory=LinkCounters)
    decode_link: LinkCounters = field(default_factory=LinkCounters)


def request_stats(
    runtime: Runtime, session: Session, clock: Clock, new_tokens: int
) -> dict[str, Any]:
    """Seconds, link, memory and placement. Decode figures cover decoding alone: the first new token
    comes from prefill, the others from passes. Rates are None when no pass was made, or nothing
    crossed the link, to tell them from. The session must still be open.

    What crossed the link is what really did, so it holds the head of a pass that was begun and not
    needed after an end of text; floor_seconds_per_pass is of the passes that were made.
    """
    passes, kv = session.passes, session.kv
    link, placement, demand = runtime.link, runtime.placement, runtime.demand
    carried = clock.decode_link
    bandwidth = link.bandwidth
    if bandwidth is None and carried.busy_seconds:
        bandwidth = carried.bytes_to_device / carried.busy_seconds
    passed = new_tokens - 1
    return {
        "seconds": {"load": clock.load, "prefill": clock.prefill, "decode": clock.decode},
        "seconds_per_token": clock.decode / passed if passes else None,
        "passes": passes,
        "tokens_per_pass": passed / passes if passes else None,
        "link": {
            "emulated": link.emulated,
            "bytes_to_device": carried.bytes_to_device,
            "bytes_to_host": carried.bytes_to_host,
            "busy_seconds": carried.busy_seconds,
            "bandwidth_gb_per_s": bandwidth and bandwidth / 1e9,
            "floor_seconds_per_pass": session.pass_bytes / passes / bandwidth
            if passes and bandwidth
            else None,
            "prefill_bytes_to_device": clock.prefill_link.bytes_to_device,
            "prefill_bytes_to_host": clock.prefill_link.bytes_to_host,
        },
        "memory": {
            "device_budget_bytes": runtime.memory.limit_bytes,
            "device_peak_bytes": runtime.memory.peak_bytes,
            "host_bytes": runtime.host_bytes,
            "host_pageable_bytes": runtime.host.pageable_bytes,
        },
        "placement": {
            "layers": demand.layers,
            "resident_weight_layers": runtime.weights.resident_layers,
            "embedding_resident": placement.embedding_resident,
            "block_tokens": demand.kv.block_tokens,
            "resident_kv_layers": kv.resident_layers(),
            "resident_kv_blocks": kv.resident_blocks(),
            "kv_blocks": kv.blocks(),
        },
    }


def drafting_stats(drafting: Drafting, decoder: Decoder) -> dict[str, Any]:
    """What was drafted and how much of it held. Shares are None where nothing was drafted."""
    outer, inner, cache = decoder.tally, decoder.inner_tally, decoder.retrieval
    settings = drafting.settings
    return {
        "levels": drafting.levels,
        "accept": settings.accept,
        "acceptance": {
            "target": outer.acceptance,
            "retrieval": inner.acceptance,
            "accepted_lengths": _histogram(outer),
            "inner_accepted_lengths": _histogram(inner),
        },
        "draft_tokens": {
            "mean": outer.drafted / outer.rounds if outer.rounds else None,
            "inner_mean": inner.drafted / inner.rounds if inner.rounds else None,
        },
        "retrieval": {
            "budget_tokens": cache.budget,
            "chunk_size": settings.chunk_size,
            "policy": settings.retrieval,
            "churn": cache.churn,
            "bytes_read_in_place": cache.bytes_read_in_place,
            "steps": inner.rounds,
        }
        if cache
        else None,
    }


def _histogram(tally: Tally) -> list[int]:
    """How many drafts had 0, 1, 2, ... tokens accepted."""
    lengths = tally.accepted_lengths
    return [lengths.get(i, 0) for i in range(max(lengths, default=-1) + 1)]
