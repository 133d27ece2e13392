"""Which tests run: the usual ones always, and each other one in one of the parts."""

from __future__ import annotations

from types import SimpleNamespace

import conftest
import pytest


class Item:
    def __init__(self, nodeid: str, **markers: int) -> None:
        self.nodeid, self._markers = nodeid, markers

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(args=(self._markers[name],)) if name in self._markers else None


def selected(*options: str) -> list[str]:
    """Names of the tests that run with these options, of a slow one, grids and others."""
    given = dict(option.split("=") for option in options)
    part = conftest._parsed_part(given["--part"]) if "--part" in given else None
    values = {"--all": "--all" in given, "--part": part}
    dropped = []
    config = SimpleNamespace(
        args=["tests"],
        getoption=values.__getitem__,
        hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items)),
    )
    items = [
        *(Item(f"a.py::plain[{i}]") for i in range(10)),
        *(Item(f"a.py::slow[{i}]", slow=1) for i in range(50)),
        *(Item(f"a.py::grid[{i}]", one_in=4) for i in range(200)),
        *(Item(f"a.py::first[{i}]", first=1) for i in range(50)),
    ]
    count = len(items)
    conftest.pytest_collection_modifyitems(config, items)
    assert len(items) + len(dropped) == (count if dropped else len(items))
    return [item.nodeid for item in items]


def test_each_test_runs_in_one_part(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    usual, every = set(selected()), set(selected("--all=1"))
    assert len(every) == 310
    assert 40 < len(usual) < 90
    parts = [set(selected(f"--part={index}/3")) for index in range(3)]
    assert set.union(*parts) == every
    for index, part in enumerate(parts):
        assert usual < part
        assert 50 < len(part - usual) < 120
        for other in parts[:index]:
            assert part & other == usual


@pytest.mark.parametrize("text", ["3/3", "-1/2", "1", "a/b"])
def test_no_such_part(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        conftest._parsed_part(text)
