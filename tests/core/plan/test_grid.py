"""A few hundred recorded plans come out as they were: see `plan_grid`."""

from __future__ import annotations

import json
import math

import pytest
from plan_grid import RECORD, cases, planned

ROWS = json.loads(RECORD.read_text())


def test_the_cases_are_those_that_were_recorded() -> None:
    assert [row["arguments"] for row in ROWS] == cases()


@pytest.mark.one_in(40)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row["arguments"]))
def test_a_recorded_plan_comes_out_again(row: dict) -> None:
    assert_alike(planned(row["arguments"]), row["gives"])


def assert_alike(ours: object, recorded: object, where: str = "") -> None:
    """Equal, but for the last digits of seconds: the order of sums may change."""
    if isinstance(recorded, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == recorded.keys(), where
        for name, value in recorded.items():
            assert_alike(ours[name], value, f"{where} {name}")
    elif isinstance(recorded, float):
        assert math.isclose(ours, recorded, rel_tol=1e-9), f"{where}: {ours} != {recorded}"
    else:
        assert ours == recorded, where
