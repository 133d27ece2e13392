"""Progress: what, how much of how much, and the time left once it is known. The clock is a fake."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from triforce_core.cli.terminal import progress
from triforce_core.cli.terminal.output import log_lines
from triforce_core.cli.terminal.progress import ProgressBars, TimeLeft


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def json_lines() -> Iterator[None]:
    log_lines(as_json=True)
    yield
    log_lines(as_json=False)


def updated(clock: FakeClock, *steps: float, total: int = 10) -> TimeLeft:
    """What has taken these seconds for each step."""
    left = TimeLeft(clock)
    for done, seconds in enumerate(steps, 1):
        clock.now += seconds
        left.update(done, total)
    return left


def shown(bars: ProgressBars, width: int) -> list[str]:
    """What a terminal shows."""
    console = Console(file=StringIO(), width=width)
    console.print(bars._progress.get_renderable())
    return console.file.getvalue().rstrip("\n").splitlines()


def test_time_left_is_steps_left_at_the_recent_rate(clock) -> None:
    left = updated(clock, 9, 2, 2, 2)
    assert left.seconds == pytest.approx(6 * 2)
    assert str(left) == "0:12 left"
    clock.now += 1.5
    assert left.seconds == pytest.approx(6 * 2 - 1.5)
    assert str(left) == "0:11 left"


def test_time_left_is_unknown_at_first_and_at_the_end(clock) -> None:
    assert str(TimeLeft(clock)) == ""
    assert updated(clock, 2).seconds is None
    assert updated(clock, 2, 2).seconds is None
    # Three steps in less than a second say nothing yet.
    assert updated(clock, 0.1, 0.1, 0.1).seconds is None
    done = updated(clock, *[2.0] * 10)
    assert (done.seconds, str(done)) == (None, "")
    clock.now += 100
    assert done.seconds is None


def test_time_left_follows_a_rate_that_changes(clock) -> None:
    """As of files that were in memory, and of those that were not."""
    left = updated(clock, *[0.1] * 50, *[2.0] * 40, total=100)
    assert left.seconds == pytest.approx(10 * 2.0)
    # Steps longer than the recent past count too.
    left = updated(clock, 60, 60, 60)
    assert left.seconds == pytest.approx(7 * 60)


def test_a_step_that_takes_long_makes_the_estimate_longer_and_never_negative(clock) -> None:
    left = updated(clock, *[1.0] * 9)
    before = left.seconds
    for _ in range(600):
        clock.now += 1.0
        assert left.seconds >= 1
    assert before == pytest.approx(1)
    left = updated(clock, *[1.0] * 5)
    clock.now += 60
    assert left.seconds > 20


def test_what_would_take_days_is_not_shown(clock) -> None:
    assert updated(clock, 1, 1, 1, total=10**9).seconds is None
    assert updated(clock, 3600, 3600, 3600, total=60).seconds == pytest.approx(57 * 3600)
    assert str(updated(clock, 100, 100, 100, total=60)) == "1:35:00 left"


def test_what_begins_anew_is_estimated_anew(clock) -> None:
    left = updated(clock, *[9.0] * 9)
    for done in (1, 2, 3):
        clock.now += 1
        left.update(done, 10)
    assert left.seconds == pytest.approx(7)


def test_estimates_are_never_wild(clock) -> None:
    drawn = random.Random(1)
    for _ in range(200):
        pace = 10 ** drawn.uniform(-3, 2)
        left, total = TimeLeft(clock), drawn.randint(1, 80)
        for done in range(1, total + 1):
            # Within a factor of two of the pace.
            clock.now += pace * drawn.uniform(0.5, 2)
            left.update(done, total)
            seconds = left.seconds
            if seconds is not None:
                assert max(1.0, 0.49 * pace * (total - done)) <= seconds
                assert seconds <= max(1.0, 2.01 * pace * (total - done))
        assert left.seconds is None


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_shows_what_how_much_and_the_time_left(clock, width: int) -> None:
    bars = ProgressBars(show=True, clock=clock)
    assert "opening the model" in shown(bars, width)[0]
    for what in ("load", "prefill"):
        bars.prompt(131_072)
        for done in range(1, 33):
            clock.now += 2
            bars.update(what, done, 64)
        (line,) = shown(bars, width)
        assert cell_len(line) <= width
        assert "…" not in line
        assert line.startswith({"load": "loading", "prefill": "prefill of 131,072 tokens"}[what])
        assert line.rstrip().endswith("32/64 layers 0:01:02 1:04 left")
    for done in range(33, 65):
        clock.now += 2
        bars.update("prefill", done, 64)
    (line,) = shown(bars, width)
    assert "64/64 layers" in line
    assert "left" not in line


def test_without_a_terminal_a_few_lines_are_written(clock, capsys) -> None:
    bars = ProgressBars(show=True, clock=clock)
    for what in ("load", "prefill"):
        for done in range(1, 1001):
            clock.now += 3.6
            bars.update(what, done, 1000)
    lines = capsys.readouterr().err.splitlines()
    # An hour each.
    assert 2 <= len(lines) <= 20
    assert lines[0] == "loading: 3 of 1000 layers, 59:50 left"
    assert lines[len(lines) // 2].startswith("prefill: 3 of 1000 layers, ")
    assert all("left" in line for line in lines)


def test_nothing_is_written_in_a_short_run_at_the_end_or_after_it(clock, capsys) -> None:
    bars = ProgressBars(show=True, clock=clock)
    clock.now += 60
    for done in (1, 2, 3):
        bars.update("load", done, 3)
    clock.now += 60
    bars.update("load", 3, 3)
    bars.stop()
    clock.now += 60
    for done in (1, 2, 3):
        clock.now += 60
        bars.update("prefill", done, 4)
    assert capsys.readouterr().err == ""
    quiet = ProgressBars(show=False, clock=clock)
    for done in (1, 2, 3):
        clock.now += 60
        quiet.update("load", done, 4)
    assert capsys.readouterr().err == ""


def test_with_json_logging_progress_is_json_lines(clock, capsys, json_lines) -> None:
    bars = ProgressBars(show=True, clock=clock)
    bars.prompt(5000)
    for what in ("load", "prefill"):
        for done in range(1, 11):
            clock.now += 10
            bars.update(what, done, 10)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["doing"], line["done"]) for line in lines] == [
        (what, done) for what in ("load", "prefill") for done in range(2, 10)
    ]
    first, last = lines[0], lines[-1]
    assert (first["of"], first["unit"], first["seconds_left"]) == (10, "layers", None)
    assert "prompt_tokens" not in first
    assert (last["prompt_tokens"], last["seconds_left"]) == (5000, pytest.approx(10))
    assert last["message"] == "prefill of 5,000 tokens: 9 of 10 layers, 0:10 left"


def test_a_terminal_is_given_back_even_after_a_failure(monkeypatch) -> None:
    bars = ProgressBars(show=True)
    written: list[bytes] = []
    monkeypatch.setattr(bars, "_terminal", True)
    monkeypatch.setattr(progress.os, "write", lambda _, data: written.append(data))
    monkeypatch.setattr(progress.sys.stderr, "fileno", lambda: 2)
    monkeypatch.setattr(bars._progress, "stop", lambda: 1 / 0)
    bars.give_back()
    assert written == [progress._SHOW_CURSOR]
