"""What is made of a model's wishes: more memory never streams more, nor drafts worse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload.errors import DoesNotFitError
from offload.formats import DTYPES
from offload.placement import device_bytes, place, streams
from triforce_core.model.shapes import read_shape
from triforce_core.settings import MethodSettings
from triforce_core.sizing.demand import Wanted
from triforce_core.sizing.fitting import Fitted, fit

GIB = 1 << 30


def wanted(shape: str, context: int, **method: object) -> Wanted:
    settings = MethodSettings(**method)
    return Wanted(read_shape(shape), DTYPES["float16"], context, settings, block_bytes=16 << 20)


def crosses(fitted: Fitted) -> int:
    """Bytes of a pass over a full context."""
    demand, placement = fitted.demand, fitted.placement
    resident = placement.resident_kv_blocks + placement.lent_kv_blocks
    blocks = max(0, demand.kv_blocks - resident)
    return demand.streamed_bytes(placement) + blocks * demand.kv.block_bytes


@pytest.mark.parametrize(
    ("shape", "context"),
    [("llama3.1-8b", 131072), ("llama2-7b-128k", 65536), ("llama2-7b", 4096)],
)
def test_what_fits_at_every_size_of_memory(shape: str, context: int) -> None:
    asks, seen = wanted(shape, context), []
    for quarters in range(8, 4 * 90):
        memory = quarters * GIB // 4
        try:
            fitted = fit(asks, memory)
        except DoesNotFitError:
            assert not seen, "refused where less was accepted"
            continue
        assert device_bytes(fitted.demand, fitted.placement) <= memory
        seen.append(fitted)
        if fitted.budget:
            assert not fitted.placement.streamed_layers
        without = asks.demand(0)
        if not streams(without, place(without, memory)):
            assert not crosses(fitted), "a cache that nobody asked for sends KV over the link"
    streaming = [fitted for fitted in seen if fitted.placement.streamed_layers]
    assert all(fitted.budget == 0 for fitted in streaming)
    between = [f.budget for f in seen if not f.placement.streamed_layers and crosses(f)]
    assert between == sorted(between)
    assert not crosses(seen[-1])
    if context > 4096:
        assert max(between) == 4096
        assert seen[-1].budget, "reads of KV are most of what a pass reads"
    else:
        assert not seen[-1].budget


def test_a_budget_that_is_asked_for_is_made_where_nothing_streams() -> None:
    assert fit(wanted("llama2-7b", 4096), 80 * GIB).budget == 0
    assert fit(wanted("llama2-7b", 4096, budget=512), 80 * GIB).budget == 512


def test_lent_memory_counts_as_the_devices_own() -> None:
    asks = wanted("llama3.1-8b", 131072).demand(0)
    placed = (place(asks, quarters * GIB // 4) for quarters in range(100, 200))
    placement = next(
        p for p in placed if p.resident_kv_blocks < asks.kv_blocks and not streams(asks, p)
    )
    assert placement.lent_kv_blocks
    assert streams(asks, replace(placement, lent_kv_blocks=placement.lent_kv_blocks - 1))
