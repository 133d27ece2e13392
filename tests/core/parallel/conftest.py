from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from thread_ranks import ThreadLeader


@pytest.fixture
def leaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ThreadLeader]]:
    """Those of engines that are made, in order."""
    made: list[ThreadLeader] = []

    def lead(count: int) -> ThreadLeader:
        made.append(ThreadLeader(count))
        return made[-1]

    monkeypatch.setattr("triforce_core.parallel.leader.lead", lead)
    # They wait for each other all the time.
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield made
    sys.setswitchinterval(before)
