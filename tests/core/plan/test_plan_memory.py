"""Planned device and host bytes are those that a run by the plan takes, within 5 % (F5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import make_model, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.model.known.shapes import read_shape
from triforce_core.plan.simulation.acceptance_curve import AcceptanceCurve
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.search import choose
from triforce_kernels import dispatch
from triforce_kernels.dispatch import REFERENCE
from triforce_offload.machine.profiles import named
from triforce_offload.weights.formats import DTYPES

CONTEXT, NEW = 1900, 24


@pytest.mark.parametrize(
    ("method", "memory"),
    [
        ("triforce", 8_200_000),
        ("triforce", 9_200_000),
        ("speculative", 5_900_000),
        ("speculative", 6_300_000),
        ("autoregressive", 5_700_000),
        ("autoregressive", 6_300_000),
    ],
)
def test_planned_bytes_are_the_measured_peak(
    tmp_path, monkeypatch, method: str, memory: int
) -> None:
    # The plan is for a GPU, where PyTorch's operators compute prompts.
    monkeypatch.setattr(dispatch, "_forced", REFERENCE)
    make_model("llama", tmp_path, max_position_embeddings=2048)
    case = Case(
        read_shape(str(tmp_path)),
        # No graphs are recorded on a CPU, so none are planned for.
        replace(named("rtx4090", 4), memory_bytes=memory, asynchronous=False),
        CONTEXT,
        NEW,
        DTYPES["float32"],
        AcceptanceCurve(inner=0.3),
        block_bytes=16 << 10,
        fixed={"draft_tokens": 6, "inner_draft_tokens": 2, "budget": 128} | {"method": method},
    )
    if method != "triforce":
        case = replace(case, fixed={k: v for k, v in case.fixed.items() if k != "budget"})
    chosen = choose(case)
    with Engine.from_pretrained(
        tmp_path,
        device="cpu",
        device_memory=memory,
        plan=chosen.plan,
        max_context=CONTEXT,
    ) as engine:
        params = SamplingParams(NEW, temperature=0)
        stats = engine.generate(random_ids(CONTEXT - NEW), params).stats
    peak, host = (stats["memory"][name] for name in ("device_peak_bytes", "host_bytes"))
    assert chosen.device_bytes == pytest.approx(peak, rel=0.05)
    assert peak <= memory
    assert chosen.host_bytes == pytest.approx(
        host, rel=0.05, abs=chosen.memory.kv.shape.block_bytes
    )
    streamed = stats["placement"]["kv_blocks"] - stats["placement"]["resident_kv_blocks"]
    assert streamed == sum(
        max(0, stats["placement"]["kv_blocks"] // 3 - share) for share in _shares(chosen.plan)
    )


def _shares(plan) -> tuple[int, ...]:
    from triforce_offload.plan.placing import share_blocks

    return share_blocks(plan.placement.resident_kv_blocks + plan.placement.reclaimed_kv_blocks, 3)
