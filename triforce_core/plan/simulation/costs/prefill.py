"""Seconds in which a device computes a prompt, layer by layer, a chunk of its tokens at a time."""

from __future__ import annotations

from triforce_core.plan.simulation.costs.forward import Costs
from triforce_core.plan.simulation.costs.launches import mixing_flops, prefill_flops
from triforce_core.plan.sizes import PREFILL_CHUNK


def prefill_seconds(costs: Costs, tokens: int) -> float:
    """Return the seconds in which one GPU's share of a prompt of `tokens` tokens is computed,
    without what crosses the link.
    """
    config, hardware = costs.config, costs.hardware
    layers, (whole, rest) = len(config.layers), divmod(tokens, PREFILL_CHUNK)
    chunks = [(whole, PREFILL_CHUNK), *([(1, rest)] if rest else [])]
    each, further = costs.launches.layer, costs.expert_launches
    launches = layers * sum(count * (each + further(rows)) for count, rows in chunks)
    launching = launches * hardware.launch_seconds
    work = costs.head(1) + (2 * layers + 1) * costs.all_reduce(tokens)
    if not hardware.asynchronous:
        return work + prefill_flops(config, tokens) / hardware.flops_per_second + launching
    work += layers * sum(count * _products(costs, rows) for count, rows in chunks)
    work += mixing_flops(config, tokens) / hardware.flops_per_second
    # The GPU computes while the host launches.
    return max(work, launching)


def _products(costs: Costs, rows: int) -> float:
    """Return the seconds of the products of an average layer with the rows of a chunk. What is not
    dense is decoded for each chunk.
    """
    matrices, (before, after, _) = costs.matrices, costs.elements
    work = costs.product(rows, before, matrices.qkv, matrices.layer_read)
    work += costs.product(rows, after, matrices.rest, matrices.layer_read)
    return work + (costs.experts(rows) if matrices.experts else 0.0)
