"""Predictions beside runs over an emulated link: of every method, from the engine's own plan."""

from __future__ import annotations

import pytest
from helpers import PLACEMENTS, random_ids

from bench.predicted import Predicted
from triforce_core import Engine, SamplingParams
from triforce_offload.machine.probe import Rates

BANDWIDTH = 1e9
RATES = Rates(
    2e10,
    1e11,
    3e-6,
    product_seconds_per_byte=((1, 1e-10), (32, 3e-10)),
    attend_bytes_per_second=1e10,
    attend_flops_per_second=5e10,
    decode_seconds_per_number=1e-9,
)


@pytest.mark.parametrize("method", ["autoregressive", "speculative", "triforce"])
def test_a_run_and_a_pass_are_predicted(tiny, method: str) -> None:
    path, _ = tiny("llama")
    predicted = Predicted(str(path), RATES)
    options = {"budget": 32} if method == "triforce" else {}
    placement = PLACEMENTS["kv"]
    with Engine.from_pretrained(
        path, device="cpu", method=method, placement=placement, max_context=256, **options
    ) as engine:
        stats = engine.generate(random_ids(100), SamplingParams(40, temperature=0)).stats
        found = predicted.run(engine, BANDWIDTH, stats)
        single = predicted.a_pass(engine, BANDWIDTH, 120, 1)
        slow = predicted.a_pass(engine, BANDWIDTH / 100, 120, 1)
    per_token = found["seconds_per_pass"] / stats["tokens_per_pass"]
    assert 0 < single <= 1.5 * found["seconds_per_pass"]
    assert found["seconds_per_token"] >= per_token
    assert slow > single
