"""Figures in the documents are those of plans and of records."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from dataclasses import replace

import pytest

from checks import figures, readme_rows
from checks.planned_tables import PLANNER, Cell, difference, planned, planner_cells, sections
from checks.readme_rows import MEASURED, README, of, readme_cells, rows
from rivals.published import PAPER, as_published
from triforce_core.cli.main import main

MEASURED_ROWS = [row for row in rows() if row["kind"] != "simulated"]


def by_plan(cells: list[Cell]) -> list[list[Cell]]:
    """Cells of the same plan together."""
    found = defaultdict(list)
    for cell in cells:
        found[cell.arguments].append(cell)
    return list(found.values())


def named(cells: list[Cell]) -> str:
    return shlex.join(cells[0].arguments)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cells", by_plan([*readme_cells()]), ids=named)
def test_simulated_figures_of_the_readme_are_planned_again(cells: list[Cell]) -> None:
    plan = planned(cells[0].arguments)
    assert not [f"{cell.place}: {wrong}" for cell in cells if (wrong := cell.difference(plan))]


@pytest.mark.one_in(60)
@pytest.mark.parametrize("cells", by_plan([*planner_cells()]), ids=named)
def test_figures_of_the_planners_tables_are_planned_again(cells: list[Cell]) -> None:
    plan = planned(cells[0].arguments)
    assert not [f"{cell.place}: {wrong}" for cell in cells if (wrong := cell.difference(plan))]


@pytest.mark.parametrize("row", MEASURED_ROWS, ids=lambda row: row["what"][:40])
def test_measured_figures_of_the_readme_are_those_of_records(row: dict[str, str]) -> None:
    name = of(row, MEASURED)
    assert name is not None, "it is not known where the row's figures come from"
    assert difference(row["result"], MEASURED[name]()) is None


def test_the_papers_settings_are_simulated_again() -> None:
    """By rows, and beside our own choices."""
    found = dict(sections(PLANNER.read_text("utf-8")))
    seconds = {}
    theirs = found["The paper, from its own settings"][0]
    for row, paper in zip(theirs, PAPER, strict=True):
        simulated = as_published(paper).seconds_per_token
        assert row["paper, s/token (measured by its authors)"] == f"{paper.seconds:.3f}"[1:] or (
            float(row["paper, s/token (measured by its authors)"]) == paper.seconds
        )
        assert difference(row["simulated"], [simulated]) is None
        percent = round(100 * (simulated / paper.seconds - 1))
        assert row[""].replace(" %", "") == f"{percent:+d}"
        seconds[row["RTX 4090s, model"], row["method"]] = simulated
    beside = 0
    for row in found["Our choices instead"][0]:
        if printed := row["the paper's settings, simulated"]:
            case = re.match(r"([12])x, (\d+B)", row["case"])
            which = f"{case[1]}, {case[2]}" if case else "1, 7B"
            method = "autoregressive" if "autoregressive" in row["case"] else "TriForce"
            assert difference(printed, [seconds[which, method]]) is None
            beside += 1
    assert beside == 7


def test_the_plan_that_the_readme_shows_is_printed_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = re.search(r"^\$ triforce (plan .*)\n((?:.*\n)*?)```", README.read_text(), re.MULTILINE)
    assert main(shlex.split(shown[1])) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    lines = [line for line in shown[2].splitlines() if line != "..."]
    assert len(lines) > 5
    assert not [line for line in lines if line not in printed]


@pytest.mark.parametrize(
    ("text", "computed", "alike"),
    [
        (".124", [0.1244], True),
        (".124", [0.1236], True),
        (".124", [0.1246], False),
        ("**.185**", [0.1846], True),
        ("2,527 of 4,096 KV blocks", [2527, 4096], True),
        ("2,527 of 4,096 KV blocks", [2528, 4096], False),
        ("131 (118)", [130.6, 118.4], True),
        ("131 (118)", [130.6], False),
        ("29.7 GiB", [29.66], True),
        ("nothing", [0.0], True),
        ("", [0], True),
        ("", [3], False),
        (".0300 s/token", [0.02996], True),
        (".030 and .061 s/token; .012 and .058", [0.03, 0.061, 0.012, 0.0584], True),
    ],
)
def test_a_figure_may_differ_by_its_rounding_alone(
    text: str, computed: list[float], alike: bool
) -> None:
    assert (difference(text, computed) is None) == alike


def test_the_script_tells_of_a_figure_that_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = next(cell for cell in planner_cells() if "`llama3.1-8b`, 131,072" in cell.place)
    wrong = replace(cell, text=".0001", place="a wrong one")
    monkeypatch.setattr(figures, "cells", lambda: (cell, wrong))
    assert figures.main([]) == 1
    said = capsys.readouterr().err
    assert said.count("FAULT") == 1
    assert "a wrong one: '.0001', and the plan has [" in said
    assert figures.main(["--only", "DFlash"]) == 0


def test_a_row_of_which_no_plan_is_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"what": "Another model", "result": ".1 s/token", "kind": "simulated"}
    monkeypatch.setattr(readme_rows, "rows", lambda: [row])
    with pytest.raises(ValueError, match="Another model"):
        list(readme_cells())
