"""Placements of SmolLM2-135M's weights and KV in the benchmarks over an emulated link."""

from __future__ import annotations

from triforce_offload.plan.placement import Placement

# More blocks than any context has.
ALL = 10**9
LAYERS = tuple(range(30))
RESIDENT = Placement((), True, ALL, 0, 0, 0)
KV_STREAMED = Placement((), True, 0, 0, 3, 2)
WEIGHTS_STREAMED = Placement(LAYERS, True, ALL, 2, 0, 0)
BOTH_STREAMED = Placement(LAYERS, True, 0, 2, 3, 2)
STREAMED = {
    "KV streamed": KV_STREAMED,
    "weights streamed": WEIGHTS_STREAMED,
    "both streamed": BOTH_STREAMED,
}
