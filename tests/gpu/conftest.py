"""Where there is no GPU these tests run on a simulated one: see `simulated_gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from simulated_gpu import REAL, Adversary, simulated
from simulated_gpu.processes import environment

from triforce_core.plan.sizes import ModelSizes
from triforce_kernels import dispatch
from triforce_kernels.dispatch import REFERENCE, VARIABLE

# Kernels divide their work by these, and the interpreter does it part by part.
_MULTIPROCESSORS = 2


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU, or as many as the marker `gpus` says: real ones if they are there.

    On a simulated one kernels are their references, but for tests with the marker `interpreted`:
    Triton's interpreter takes twenty times as long.
    """
    marker = request.node.get_closest_marker("gpus")
    gpus = marker.args[0] if marker else 1
    if REAL:
        if torch.cuda.device_count() < gpus:
            pytest.skip(f"needs {gpus} CUDA GPUs")
        yield
        return
    if why := request.node.get_closest_marker("not_simulated"):
        pytest.skip(why.args[0])
    if not request.node.get_closest_marker("interpreted"):
        monkeypatch.setattr(dispatch, "_forced", REFERENCE)
        # Of processes that the test starts.
        monkeypatch.setenv(VARIABLE, REFERENCE)
    from triforce_core.plan import by_time
    from triforce_offload.graphs import _recording_stream

    # What an engine chooses must not depend on the machine.
    monkeypatch.setattr(by_time, "measure_processor", lambda: None)
    for name, value in environment(gpus, _MULTIPROCESSORS).items():
        monkeypatch.setenv(name, value)
    strict = request.node.get_closest_marker("strict") is not None
    with simulated(
        Adversary.LATE, gpus=gpus, multiprocessors=_MULTIPROCESSORS, strict=strict
    ) as machine:
        yield
        # Streams of a machine that is gone.
        _recording_stream.cache_clear()
    assert machine.faults == []


@pytest.fixture
def recorded_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are recorded, though references read all keys that there is room for."""

    def records_passes(sizes: ModelSizes, budget: int) -> bool:
        return sizes.records_passes and sizes.graphs and not (budget or sizes.same_bits)

    monkeypatch.setattr(ModelSizes, "_records_passes", records_passes)
