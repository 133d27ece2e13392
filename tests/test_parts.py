"""Which tests run: the usual ones always, and each other one in one of the parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from selected import divided, parsed_part


class Item:
    """A test with markers, and their numbers."""

    def __init__(self, nodeid: str, **markers: int) -> None:
        self.nodeid, self._markers = nodeid, markers

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(args=(self._markers[name],)) if name in self._markers else None


ITEMS = [
    *(Item(f"a.py::plain[{i}]") for i in range(10)),
    *(Item(f"a.py::slow[{i}]", slow=1) for i in range(50)),
    *(Item(f"a.py::grid[{i}]", one_in=4) for i in range(200)),
    *(Item(f"a.py::first[{i}]", first=1) for i in range(50)),
]


def test_each_test_runs_in_one_part() -> None:
    usual, others = map(set, divided(ITEMS, None, on_gpu=False))
    assert usual | others == set(ITEMS)
    assert 40 < len(usual) < 90
    parts = [set(divided(ITEMS, (index, 3), on_gpu=False)[0]) for index in range(3)]
    assert set.union(*parts) == set(ITEMS)
    for index, part in enumerate(parts):
        assert usual < part
        assert 50 < len(part - usual) < 120
        for other in parts[:index]:
            assert part & other == usual


def test_grids_are_whole_on_a_gpu() -> None:
    runs, _ = divided(ITEMS, None, on_gpu=True)
    assert sum("grid" in item.nodeid for item in runs) == 200


@pytest.mark.parametrize("text", ["3/3", "-1/2", "1", "a/b"])
def test_no_such_part(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parsed_part(text)
