"""The check of the demo beside busy processes: what it starts, ends and concludes."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from checks.demo_under_load import Run, busy_processes, compared, timed

QUIET = [Run(10.0, "text"), Run(11.0, "text"), Run(9.0, "text")]


@pytest.mark.parametrize(
    ("beside_two", "holds"),
    [
        (Run(30.0, "text"), True),
        (Run(30.1, "text"), False),
        (Run(20.0, "another text"), False),
    ],
)
def test_the_bound_is_three_times_the_quiet_median_and_one_text(beside_two, holds) -> None:
    figures = compared({0: QUIET, 1: [Run(12.0, "text")], 2: [Run(12.0, "text"), beside_two]})
    assert figures["holds"] is holds
    assert figures["busy_processes"]["0"]["median_seconds"] == 10.0
    assert figures["busy_processes"]["1"]["median_times_quiet"] == 1.2


def test_busy_processes_run_beside_the_command_and_end_with_it() -> None:
    before = psutil.Process().children()
    with busy_processes(2):
        assert len(psutil.Process().children()) == len(before) + 2
    assert psutil.Process().children() == before
    # It counts the processes that its parent has besides itself.
    count = f"import psutil; print(len(psutil.Process({os.getpid()}).children()))"
    assert int(timed((sys.executable, "-c", count), 2).text) == len(before) + 3
