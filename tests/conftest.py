from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import add_tokenizer, make_model
from hypothesis import settings
from selected import divided, parsed_part

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

if "PYTEST_XDIST_WORKER" in os.environ and "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # threads of several processes would wait for one another

from triforce_kernels import dispatch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="slow tests and whole grids too")
    parser.addoption(
        "--part",
        type=parsed_part,
        metavar="I/N",
        help="of slow tests and of whole grids one of N parts too, of which the first is 0/N",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only `--all` runs, or `--part` a part of, unless tests are named."""
    if config.getoption("--all") or any("::" in each for each in config.args):
        return
    part, on_gpu = config.getoption("--part"), torch.cuda.is_available()
    items[:], left_out = divided(items, part, on_gpu=on_gpu)
    config.hook.pytest_deselected(items=left_out)


# The same examples every time, however slow the machine is.
settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Commands that tests run keep their caches there too, and find nobody's settings."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="session")
def whole(pytestconfig: pytest.Config) -> bool:
    """Whether `--all` is given: a test that costs more the more it tries does all of it then."""
    return pytestconfig.getoption("--all")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.nn.Module]]:
    """tiny(family): the directory of a tiny model and its transformers twin, made once."""
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def make(family: str = "llama") -> tuple[Path, torch.nn.Module]:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = (directory, make_model(family, directory))
        return made[family]

    return make


@pytest.fixture
def two_threads() -> Iterator[None]:
    """What the CPU's attention allocates grows with the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama(tiny: Callable[[str], tuple[Path, torch.nn.Module]]) -> tuple[Path, torch.nn.Module]:
    return tiny("llama")


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny Llama with a tokenizer."""
    directory = tmp_path_factory.mktemp("speaking")
    make_model("llama", directory)
    add_tokenizer(directory)
    return directory


@pytest.fixture
def recordable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references compute: their operations are PyTorch's, which tests can record and count."""
    monkeypatch.setattr(dispatch, "_forced", dispatch.REFERENCE)
