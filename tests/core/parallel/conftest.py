from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from processes import ENDS_WITHIN
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


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process that is a rank, nothing in shared memory."""
    before = set(os.listdir("/dev/shm"))
    yield
    until = time.monotonic() + ENDS_WITHIN

    def left() -> list[str]:
        lines = [" ".join(it.info["cmdline"] or ()) for it in psutil.process_iter(["cmdline"])]
        mine = [line for line in lines if "triforce_core.parallel" in line]
        # Other tests run beside this one.
        return mine if "PYTEST_XDIST_WORKER" not in os.environ else []

    def shared() -> set[str]:
        return set(os.listdir("/dev/shm")) - before

    # Of other tests that run beside this one, it may be there for a while.
    while (left() or shared()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left()
    assert not shared()
