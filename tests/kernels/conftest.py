"""Every kernel is tested as its reference, as Triton computes it (on a GPU if there is one, else in
Triton's interpreter) and, without a GPU, as the processor's compiled kernels do. Fresh tensors hold
NaN, so that nothing counts on what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from exactness import DEVICE
from quick_interpreter import quicken

from triforce_kernels import dispatch
from triforce_kernels.dispatch import HOST, REFERENCE, TRITON
from triforce_kernels.host.library import library, makes


@pytest.fixture(
    params=[
        REFERENCE,
        pytest.param(
            TRITON, marks=pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
        ),
        pytest.param(
            HOST,
            marks=pytest.mark.skipif(
                library() is None or DEVICE.type != "cpu",
                reason="needs the compiled kernels, and a processor to run them",
            ),
        ),
    ]
)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations of every kernel."""
    monkeypatch.setattr(dispatch, "_forced", request.param)
    return request.param


MAKES = makes(library()) if library() else []


@pytest.fixture(params=MAKES)
def make(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each make of vector units that this processor has."""
    library().triforce_use_make(MAKES.index(request.param))
    yield request.param
    library().triforce_use_make(0)


@pytest.fixture(scope="session", autouse=True)
def quick() -> None:
    quicken()


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def draw():
    """draw(*shape): standard normal numbers on the device, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    return make
