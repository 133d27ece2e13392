"""Where there is no GPU these tests run on a simulated one: see `simulated_gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from simulated_gpu import REAL, Adversary, simulated


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU, or as many as the marker `gpus` says: real ones if they are there."""
    marker = request.node.get_closest_marker("gpus")
    gpus = marker.args[0] if marker else 1
    if REAL:
        if torch.cuda.device_count() < gpus:
            pytest.skip(f"needs {gpus} CUDA GPUs")
        yield
        return
    if why := request.node.get_closest_marker("not_simulated"):
        pytest.skip(why.args[0])
    from offload.graphs import _recording_stream

    with simulated(Adversary.LATE, gpus=gpus) as machine:
        yield
        # Streams of a machine that is gone.
        _recording_stream.cache_clear()
    assert machine.faults == []
