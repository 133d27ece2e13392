"""Progress bars on stderr for everything before the first token."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from triforce_core.cli.terminal.output import logs_json, say

# Without a terminal, seconds before the first progress line; each further wait is twice as long.
_SECONDS = 5.0
_SHOW_CURSOR = b"\x1b[?25h"
# Seconds over which the rate is taken, and the least steps and seconds for an estimate.
_RECENT = 30.0
_LEAST_STEPS = 2
_LEAST_SECONDS = 1.0
# Longer estimates are not shown.
_MOST_SECONDS = 100 * 3600.0

_LABELS = {"load": "loading", "copies": "making draft copies"}

Clock = Callable[[], float]


class TimeLeft:
    """An estimate of the seconds until something ends, from its rate over the recent past.

    Safe to read in one thread while another one updates it.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        # (time in seconds, done, total) of recent updates, oldest first.
        self._seen: tuple[tuple[float, int, int], ...] = ()

    def update(self, done: int, total: int) -> None:
        now, seen = self._clock(), self._seen
        if seen and (done < seen[-1][1] or total != seen[-1][2]):
            # Something else has begun.
            seen = ()
        # Keep one update from before the recent past: slow steps may take longer than that.
        while len(seen) > _LEAST_STEPS and seen[1][0] < now - _RECENT:
            seen = seen[1:]
        self._seen = (*seen, (now, done, total))

    @property
    def seconds(self) -> float | None:
        """Seconds left, 1 or more, or None if they are not known or it has ended."""
        seen = self._seen
        if not seen:
            return None
        (began, first, _), (last, done, total) = seen[0], seen[-1]
        if done >= total or done - first < _LEAST_STEPS or last - began < _LEAST_SECONDS:
            return None
        step = (last - began) / (done - first)
        waited = max(0.0, self._clock() - last)
        if waited > step:
            # The next step takes longer than those before, so the rate is lower than theirs.
            step = (last - began + waited) / (done - first + 1)
        left = max(1.0, (total - done) * step - min(waited, step))
        return left if left < _MOST_SECONDS else None

    def __str__(self) -> str:
        """The time left as `0:48 left`, or an empty string."""
        seconds = self.seconds
        if seconds is None:
            return ""
        minutes, rest = divmod(math.ceil(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        if hours:
            return f"{hours}:{minutes:02}:{rest:02} left"
        return f"{minutes}:{rest:02} left"


class ProgressBars:
    """Progress bars for opening a model, loading it and prefill.

    Without a terminal, a few lines are written, and with JSON logging one every _SECONDS.
    """

    def __init__(self, *, show: bool, opening: bool = True, clock: Clock = time.monotonic) -> None:
        """opening: whether to show a bar for opening the model
        clock: returns a time in seconds
        """
        console = Console(stderr=True)
        terminal = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
        self._terminal = show and terminal and not logs_json()
        self._lines = show and not self._terminal
        self._clock = clock
        self._doing = ""
        self._prompt_tokens: int | None = None
        self._left = TimeLeft(clock)
        self._wait = _SECONDS
        self._next_line = clock() + _SECONDS
        self._stopped = False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counted]}"),
            # In a narrow terminal the bar alone gives way.
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not self._terminal,
            get_time=clock,
        )
        self._task: TaskID = self._add("opening the model", None, visible=opening)

    def prompt(self, tokens: int) -> None:
        """Show how many tokens the next prefill processes."""
        self._prompt_tokens = tokens

    def update(self, what: str, done: int, total: int) -> None:
        """Update the bar. what: "load", "copies" or "prefill". done, total: counts of layers"""
        if self._stopped:
            return
        label = self._label(what)
        if what != self._doing:
            self._doing, self._left = what, TimeLeft(self._clock)
            self._wait, self._next_line = _SECONDS, self._clock() + _SECONDS
            self._progress.update(self._task, visible=False)
            self._task = self._add(label, total)
        self._left.update(done, total)
        self._progress.update(
            self._task, completed=done, total=total, counted=f"{done}/{total} layers"
        )
        if self._lines and done < total and self._clock() >= self._next_line:
            self._say(label, done, total)

    def stop(self) -> None:
        """Remove the bars from the terminal, for good. Repeated calls have no effect."""
        self._stopped = True
        self._progress.stop()

    def give_back(self) -> None:
        """Restore the terminal, even while the bars are being drawn or removed.

        Meant for a process that is about to exit.
        """
        with suppress(Exception):
            self._progress.stop()
        if self._terminal:
            # Write to the descriptor directly: this thread may be in the middle of a buffered
            # write.
            with suppress(OSError):
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _add(self, label: str, total: int | None, *, visible: bool = True) -> TaskID:
        return self._progress.add_task(
            label, total=total, counted="", left=self._left, visible=visible
        )

    def _label(self, what: str) -> str:
        if what in _LABELS:
            return _LABELS[what]
        tokens = self._prompt_tokens
        return "prefill" if tokens is None else f"prefill of {tokens:,} tokens"

    def _say(self, label: str, done: int, total: int) -> None:
        if not logs_json():
            self._wait *= 2
        self._next_line = self._clock() + self._wait
        about: dict[str, object] = {"doing": self._doing, "done": done, "of": total}
        about |= {"unit": "layers", "seconds_left": self._left.seconds}
        if self._doing == "prefill" and self._prompt_tokens is not None:
            about["prompt_tokens"] = self._prompt_tokens
        left = f", {self._left}" if str(self._left) else ""
        say(f"{label}: {done} of {total} layers{left}", **about)
