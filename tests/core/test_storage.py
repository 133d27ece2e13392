"""How weights and KV are kept where nobody says so. No GPU is asked: its memory is a number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from triforce_core.model.shapes import read_shape
from triforce_core.model.tensors import split_layouts
from triforce_core.settings import EngineConfig, MethodSettings
from triforce_core.sizing.demand import Wanted
from triforce_core.storage import asks_for_split_kv, with_split_unasked
from triforce_kernels.dispatch import REFERENCE, TRITON
from triforce_offload.errors import UsageError
from triforce_offload.placement import Placement
from triforce_offload.placing import place
from triforce_offload.plan import MemoryPlan

GPU, GIB = torch.device("cuda", 0), 1 << 30
LLAMA = Wanted(
    read_shape("llama3.1-8b"), torch.bfloat16, 131072, MethodSettings(), block_bytes=16 << 20
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> None:
    monkeypatch.setattr("triforce_core.storage.backend", lambda device: TRITON)


def chosen(available: int, wanted: Wanted = LLAMA, **config: object) -> tuple[bool, bool]:
    """Whether weights are split, and whether KV is."""
    made = with_split_unasked(EngineConfig(**config), wanted, GPU, available)
    return made.weights.split, made.kv_split


def test_what_would_stream_is_split_on_a_gpu() -> None:
    assert chosen(22 * GIB) == (True, True)
    assert chosen(22 * GIB, weights="dense") == (False, True)
    assert chosen(22 * GIB, kv="dense") == (True, False)
    # Not even the weights fit.
    assert chosen(8 * GIB) == (True, True)


def test_what_fits_is_dense() -> None:
    assert chosen(60 * GIB) == (False, False)


def test_kv_is_dense_where_it_fits_once_weights_are_split() -> None:
    demand = LLAMA.demand(0)
    resident = Placement((), True, demand.kv_blocks, 0, 0, 0)
    little_less = MemoryPlan(demand, resident).device_bytes - 2 * GIB
    assert place(demand, little_less).streams
    assert chosen(little_less) == (True, False)


def test_a_placement_that_was_asked_for_is_asked() -> None:
    everything = Placement((), True, 10**6, 0, 0, 0)
    assert chosen(8 * GIB, placement=everything) == (False, False)
    some_kv = Placement((), True, 10, 0, 2, 1)
    assert chosen(60 * GIB, placement=some_kv) == (True, True)
    # One without slots for KV.
    a_layer = Placement((3,), True, 10**6, 2, 0, 0)
    assert chosen(60 * GIB, placement=a_layer) == (True, False)


def test_weights_that_ranks_share_stay_dense() -> None:
    """Unasked: if one rank has a matrix without room for its exceptions, all would be refused."""
    made = with_split_unasked(EngineConfig(), LLAMA, GPU, 22 * GIB, alone=False)
    assert (made.weights.split, made.kv_split) == (False, True)


def test_other_numbers_devices_and_backends_have_none(monkeypatch) -> None:
    half = replace(LLAMA, dtype=torch.float16)
    assert chosen(22 * GIB, half) == (False, False)
    config = EngineConfig()
    assert with_split_unasked(config, LLAMA, torch.device("cpu"), 22 * GIB) is LLAMA
    monkeypatch.setattr("triforce_core.storage.backend", lambda device: REFERENCE)
    assert chosen(22 * GIB) == (False, False)


def test_matrices_without_room_for_their_exceptions_stay_dense() -> None:
    names = {"layers.3.down", "head"}
    made = with_split_unasked(EngineConfig(), LLAMA, GPU, 22 * GIB, names)
    assert made.layouts == split_layouts(LLAMA.config, LLAMA.dtype, names)
    assert made.layouts != split_layouts(LLAMA.config, LLAMA.dtype)


def test_kv_split_that_was_asked_for() -> None:
    assert asks_for_split_kv(EngineConfig(kv="split"), torch.bfloat16)
    assert not asks_for_split_kv(EngineConfig(), torch.bfloat16)
    with pytest.raises(UsageError, match="only bfloat16 can be split, and KV is in float16 here"):
        asks_for_split_kv(EngineConfig(kv="split"), torch.float16)
    asked = replace(LLAMA, kv_split=True)
    assert chosen(60 * GIB, asked, kv="split") == (False, True)
