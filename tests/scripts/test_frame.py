"""The frame of benchmarks and checks: what it records, prints and returns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import frame
from frame import Benchmark, Option, command, faults_of, merge, print_record


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(frame, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["scripts/bench some", "--count", "2"])
    return tmp_path


def counting(*parts: dict | BaseException) -> Benchmark:
    def measure(args) -> Iterator[dict]:
        yield {"count": args.count}
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            yield part

    return Benchmark("Counts.", "bench_some", measure, (Option("--count", 1, "how many"),))


ROWS = (
    {"rows": {"one": {"took": {"seconds": 1.234}, "n": 4, "m": "x", "runs": [7]}}},
    {"rows": {"two": {"took": {"seconds": 2.0}, "n": 5}}},
)


def test_a_recorded_command_names_files_without_their_folders(monkeypatch) -> None:
    arguments = ["scripts/bench some", "--model", "/home/someone/model.gguf", "--result", "here/r"]
    monkeypatch.setattr("sys.argv", arguments)
    assert command() == "python scripts/bench some --model model.gguf --result here/r"


def test_parts_become_one_record_with_its_origin(results: Path, capsys) -> None:
    assert counting(*ROWS)() == 0
    record = json.loads((results / "bench_some.json").read_text())
    assert record["command"] == "python scripts/bench some --count 2"
    assert {"date", "hardware", "versions"} <= record.keys()
    assert record["count"] == 2
    assert record["rows"] == ROWS[0]["rows"] | ROWS[1]["rows"]
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["count:", "2"] in said
    table = [[word for word in line if word.isascii()] for line in said]
    assert ["rows", "one", "two"] in table
    assert ["took.seconds", "1.234", "2"] in table
    assert ["n", "4", "5"] in table
    assert ["m", "x"] in table


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (ModuleNotFoundError("no gguf"), 1)]
)
def test_what_was_measured_before_an_error_is_kept(
    results: Path, capsys, error: BaseException, code: int
) -> None:
    assert counting(ROWS[0], error, ROWS[1])(["--json"]) == code
    assert list(json.loads((results / "bench_some.json").read_text())["rows"]) == ["one"]
    said = capsys.readouterr()
    assert list(json.loads(said.out)["rows"]) == ["one"]
    assert ("no gguf" in said.err) == (code == 1)


def test_another_result_and_json(results: Path, tmp_path: Path, capsys) -> None:
    assert counting(*ROWS)(["--json", "--result", str(tmp_path / "other" / "name.json")]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 1
    assert (tmp_path / "other" / "name.json").exists()
    assert not (results / "bench_some.json").exists()


@pytest.mark.parametrize(
    "part",
    [
        {"faults": ["one"]},
        {"wrong": ["one"]},
        {"F1": {"faults": [3]}},
        {"resident": {"same_tokens": False}},
        {"same_answer": False},
        {"holds": False},
        {"hung_clients": 1},
        {"least_p_allowed": 1e-6, "L1": {"least_p": 1e-7}},
    ],
)
def test_a_fault_anywhere_ends_with_1(results: Path, part: dict) -> None:
    assert counting(*ROWS, part)() == 1
    assert len(faults_of(part)) == 1


def test_a_record_without_faults_has_none() -> None:
    assert not faults_of({"faults": [], "same_tokens": True, "hung_clients": 0, "holds": True})
    assert not faults_of({"least_p_allowed": 1e-6, "L1": {"least_p": 1e-5}})


def test_parts_merge_and_stay_as_they_were() -> None:
    record: dict = {}
    first = {"a": {"b": 1}, "list": [1], "value": 1}
    merge(record, first)
    merge(record, {"a": {"c": 2}, "list": [2], "value": 3})
    assert record == {"a": {"b": 1, "c": 2}, "list": [1, 2], "value": 3}
    assert first == {"a": {"b": 1}, "list": [1], "value": 1}


def test_a_table_with_more_entries_than_figures_has_a_row_for_each(capsys) -> None:
    print_record({"rows": {name: {"n": n} for n, name in enumerate("abc")}})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = [[word for word in line if word.isascii()] for line in lines]
    assert ["rows", "n"] in table
    assert ["c", "2"] in table
