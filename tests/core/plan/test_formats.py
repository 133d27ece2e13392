"""How weights and KV are kept where nobody says so. No GPU is asked: its memory is a number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triforce_core.model.known.shapes import read_shape
from triforce_core.model.tensors import split_layouts
from triforce_core.plan.formats import with_asked_formats, with_split_unasked
from triforce_core.plan.machine import Device, Room
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import EngineConfig, MethodSettings
from triforce_offload.errors import UsageError
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import place
from triforce_offload.weights.formats import DTYPES

GIB = 1 << 30
GPU = Device(gpu=True, kernels=True, copy_bytes=16 << 20)
LLAMA = ModelSizes(
    read_shape("llama3.1-8b"), DTYPES["bfloat16"], 131072, MethodSettings(), device=GPU
)


def chosen(available: int, wanted: ModelSizes = LLAMA, **config: object) -> tuple[bool, bool]:
    """Whether weights are split, and whether KV is."""
    made = with_split_unasked(wanted, EngineConfig(**config), available)
    return made.weights.split, made.kv_split


def asked(sizes: ModelSizes, **config: object) -> ModelSizes:
    """The sizes with what was asked for, of a model that is not quantised."""
    return with_asked_formats(sizes, EngineConfig(**config), lambda name: [(1, None)], Room(GIB))


def test_what_would_stream_is_split_on_a_gpu() -> None:
    assert chosen(22 * GIB) == (True, True)
    assert chosen(22 * GIB, weights="dense") == (False, True)
    assert chosen(22 * GIB, kv="dense") == (True, False)
    # Not even the weights fit.
    assert chosen(8 * GIB) == (True, True)


def test_what_fits_is_dense() -> None:
    assert chosen(60 * GIB) == (False, False)


def test_kv_is_dense_where_it_fits_once_weights_are_split() -> None:
    demand = LLAMA.requirements(0)
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


def test_other_numbers_devices_and_backends_have_none() -> None:
    half = replace(LLAMA, dtype=DTYPES["float16"])
    assert chosen(22 * GIB, half) == (False, False)
    for device in (replace(GPU, gpu=False), replace(GPU, kernels=False)):
        other = replace(LLAMA, device=device)
        assert with_split_unasked(other, EngineConfig(), 22 * GIB) is other


def test_matrices_without_room_for_their_exceptions_stay_dense() -> None:
    names = {"layers.3.down", "head"}
    made = with_split_unasked(LLAMA, EngineConfig(), 22 * GIB, names)
    assert made.layouts == split_layouts(LLAMA.config, LLAMA.dtype, names)
    assert made.layouts != split_layouts(LLAMA.config, LLAMA.dtype)


def test_formats_that_were_asked_for() -> None:
    assert asked(LLAMA, kv="split").kv_split
    assert not asked(LLAMA, kv="auto").kv_split
    assert asked(LLAMA, weights="split").weights.split
    assert asked(LLAMA, weights="auto").weights == LLAMA.weights
    assert chosen(60 * GIB, asked(LLAMA, kv="split"), kv="split") == (False, True)


def test_formats_that_numbers_cannot_have_are_refused() -> None:
    half, single = (replace(LLAMA, dtype=DTYPES[name]) for name in ("float16", "float32"))
    with pytest.raises(UsageError, match="only bfloat16 can be split, and KV is in float16 here"):
        asked(half, kv="split")
    for other in (half, single):
        with pytest.raises(UsageError, match="only bfloat16, FP8, Q6_K and Q5_K can be split"):
            asked(other, weights="split")
    with pytest.raises(UsageError, match="and these are not"):
        asked(LLAMA, weights="stored")
