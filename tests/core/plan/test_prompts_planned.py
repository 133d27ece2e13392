"""Seconds of prompts: what is decoded for each chunk, and how few launches many experts take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from triforce_core.model.known.shapes import read_model
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.costs.launches import EXPERT_LAUNCHES, prefill_flops
from triforce_core.plan.simulation.costs.prefill import prefill_seconds
from triforce_core.plan.sizes import PREFILL_CHUNK
from triforce_kernels.experts.grouped import in_tiles
from triforce_offload.machine.profiles import named

TOKENS = 32 * PREFILL_CHUNK


def case_of(name: str) -> Case:
    shape = read_model(name)
    return Case(shape.config, named("rtx4090"), TOKENS, pieces=shape.pieces)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("qwen3-30b-a3b:Q4_K_M", 1.2, 2.5), ("qwen3-32b:Q4_K_M", 1.05, 1.3)]
)
def test_a_prompt_takes_its_products_and_decoding(name: str, least: float, most: float) -> None:
    """Many experts do not make it wait for launches, and no more rows of tiles are empty than
    have tokens.
    """
    costs = case_of(name).costs
    arithmetic = prefill_flops(costs.config, TOKENS) / costs.hardware.flops_per_second
    assert least * arithmetic < prefill_seconds(costs, TOKENS) < most * arithmetic


def test_launches_bound_a_prompt_whose_experts_are_multiplied_one_by_one() -> None:
    costs = case_of("qwen3-30b-a3b:Q4_K_M").costs
    slow = replace(costs.hardware, launch_seconds=1e-3)
    each = costs.launches.layer + costs.expert_launches(PREFILL_CHUNK)
    assert each < 64, "and not some for each of 128 experts"
    seconds = prefill_seconds(replace(costs, hardware=slow), TOKENS)
    assert seconds == pytest.approx(48 * 32 * each * 1e-3)
    assert costs.expert_launches(1 << 17) > 128 * 10


class Counted(TorchDispatchMode):
    """Counts operations that make no view."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        plain = operation.overloadpacket.__name__
        self.count += not (operation.is_view or plain.startswith("empty"))
        return operation(*args, **kwargs or {})


def test_many_rows_are_sorted_by_as_many_launches_as_are_counted() -> None:
    """The sort itself takes several kernels."""
    chosen = torch.rand(PREFILL_CHUNK, 16, generator=torch.Generator().manual_seed(0))
    with Counted() as counted:
        in_tiles(chosen.topk(2).indices, 16, 64)
    assert counted.count < EXPERT_LAUNCHES[2] < counted.count + 10
