"""The check that runs the suite everywhere: what each run is told, and what is kept of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import checks.suite_everywhere as script
import frame
from checks.suite_everywhere import BUSY, ENVIRONMENTS, Environment, Run

SMALL = """
import os

import psutil
import pytest


def test_threads():
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_variables():
    assert "MKL_ENABLE_INSTRUCTIONS" not in os.environ


def test_alone():
    beside = psutil.Process(os.getppid()).children()
    assert sum("while True: pass" in each.cmdline() for each in beside) == 0


@pytest.mark.skip
def test_nothing():
    pass
"""
# Of pytest's plugins only what the suite's command names.
QUICK = (
    "-n",
    "0",
    *("-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest"),
)
RUN = Run("", {}, 0, "2026-01-01", script.revision(), (), 1.0, 0, 3, 0, ())


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(frame, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["suite_everywhere.py"])
    return tmp_path / "suite_everywhere.json"


def test_a_small_suite_beside_busy_processes_and_with_four_threads(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_small.py"
    file.write_text(SMALL)
    # What the caller has set reaches no run that does not set it.
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "SSE4_2")
    options = ["--runs", "1", "--only", "busy", "threads-4"]
    assert script.main([*options, "--", str(file), *QUICK]) == 1
    found = json.loads(record.read_text())
    said = [(run["environment"], run["passed"], run["skipped"]) for run in found["runs"]]
    assert said == [("busy", 2, 1), ("threads-4", 2, 1)]
    failed = [[name.split("::")[1] for name in run["failed"]] for run in found["runs"]]
    assert failed == [["test_alone"], ["test_threads"]]
    assert [name.split("::")[1] for name in found["failures_by_test"]] == failed[0] + failed[1]
    assert found["holds"] is False
    assert found["runs"][1]["variables"]["OMP_NUM_THREADS"] == "4"
    assert found["runs"][0]["seconds"] > 0
    assert {"date", "command", "hardware"} <= found.keys()


def test_a_suite_that_does_not_run_is_a_failure(record: Path, tmp_path: Path) -> None:
    file = tmp_path / "test_none.py"
    file.write_text("")
    options = ["--only", "threads-1", "--", str(file), *QUICK]
    assert script.main(options) == 1
    assert json.loads(record.read_text())["runs"][0]["failed"] == ["pytest, with exit code 5"]


def test_a_failure_that_a_resumed_result_has_is_still_one(record: Path, tmp_path: Path) -> None:
    test_a_suite_that_does_not_run_is_a_failure(record, tmp_path)
    file = str(tmp_path / "test_none.py")
    assert script.main(["--only", "threads-1", "--resume", "--", file, *QUICK]) == 1
    assert len(json.loads(record.read_text())["runs"]) == 1


def test_an_interrupt_loses_no_run_and_the_others_are_made_later(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def suite(environment: Environment, arguments: Sequence[str]) -> Run:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(environment.name)
        return replace(RUN, environment=environment.name, pytest=tuple(arguments))

    monkeypatch.setattr(script, "suite", suite)
    assert script.main(["--runs", "3"]) == 130
    assert [run["environment"] for run in json.loads(record.read_text())["runs"]] == ["busy"] * 2
    made[:] = []
    assert script.main(["--runs", "3", "--resume"]) == 130
    assert made == ["busy", ENVIRONMENTS[1].name]
    # Of other tests none was run yet.
    made[:] = []
    assert script.main(["--runs", "3", "--resume", "--", "tests/offload"]) == 130
    assert made == [BUSY.name] * 2
