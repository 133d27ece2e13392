from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import add_tokenizer, make_model
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

if "PYTEST_XDIST_WORKER" in os.environ and "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # threads of several processes would wait for one another

from triforce_kernels import dispatch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="slow tests and whole grids too")
    parser.addoption(
        "--part",
        type=_parsed_part,
        metavar="I/N",
        help="of slow tests and of whole grids one of N parts too, of which the first is 0/N",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only `--all` runs, or `--part` in parts, unless tests are named one by one.

    Grids marked `one_in` are whole on a GPU, which takes little time for them.
    """
    if config.getoption("--all") or any("::" in each for each in config.args):
        return
    on_gpu, seen = torch.cuda.is_available(), set()
    index, parts = config.getoption("--part") or (0, 0)
    left: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        function = item.nodeid.split("[")[0]
        grid = item.get_closest_marker("one_in")
        further = function in seen and (
            item.get_closest_marker("first") is not None
            or (grid is not None and not on_gpu and _number(item.nodeid) % grid.args[0] != 0)
        )
        usual = item.get_closest_marker("slow") is None and not further
        # Other bits than those that choose cells of a grid.
        chosen = parts > 0 and (_number(item.nodeid) >> 32) % parts == index
        left[usual or chosen].append(item)
        seen.add(function)
    items[:] = left[True]
    config.hook.pytest_deselected(items=left[False])


def _parsed_part(text: str) -> tuple[int, int]:
    """The numbers of I/N."""
    index, parts = map(int, text.split("/"))
    if not 0 <= index < parts:
        raise ValueError(text)
    return index, parts


def _number(name: str) -> int:
    """A number of 64 bits for a name. CRC-32 would not do: of names that differ in a few letters,
    far more or fewer than one in 2 or 3 are multiples of that.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


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
