"""F6: whatever fails of a small run, load to saved context: a typed error or the same tokens, the
next request is right, and memory, threads and files are as they were.

Every allocation of device and host memory, every copy, wait and write is a place that may fail; the
long version goes through all of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fault_points import KINDS
from fault_runs import CASES, Runs, family

# What may come of a fault of each kind: the run goes on without what it was for, or this error.
ERRORS = {
    "budget": "DoesNotFitError",
    "device memory": "OutOfDeviceMemoryError",
    "temporary": "OutOfDeviceMemoryError",
    "host memory": "DoesNotFitError",
    "mapping": "DoesNotFitError",
    "copy asked": "DeviceFailedError",
    "copy": "LinkError",
    "wait": "LinkError",
    "write": "OutputError",
    "collective": "RankError",
}
# Places of each kind that are tried in a case.
EACH = {"triforce, KV streams": 2}


@pytest.fixture
def runs(tiny, tmp_path, monkeypatch):
    """One case's runs."""

    def make(case: str) -> Runs:
        folder = tmp_path / "written"
        folder.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        path: Path = tiny(family(case))[0]
        return Runs(path, case, folder)

    return make


@pytest.mark.first
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"two ranks"}))
def test_whatever_fails_is_a_typed_error_and_the_next_request_is_right(runs, case: str) -> None:
    ours = runs(case)
    # A run passes places of every kind but those of ranks.
    assert {kind for kind in KINDS if ours.counts[kind]} == KINDS.keys() - {"collective"}
    outcomes: Counter[str] = Counter()
    for kind, at in ours.sample(len(case), EACH.get(case, 1)):
        outcome = ours.fail_at(kind, at)
        assert outcome in ("same", ERRORS[kind]), f"{kind} {at}"
        outcomes[outcome] += 1
    # Most faults cannot be done without what they take away.
    assert len(outcomes) > 3


@pytest.mark.slow
def test_whichever_collective_fails_the_ranks_end_and_others_can_be_made(runs) -> None:
    ours = runs("two ranks")
    places = ours.places("collective")
    # Two sums a layer, one of what is looked up and a gathering, in each forward.
    assert len(places) > 40
    # The first is of ranks that have only just met.
    for place in (places[0], places[len(places) // 2]):
        assert ours.fail_at(*place) == "RankError"
    ours.go_well()
