"""Progress bars on stderr for everything before the first token."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from triforce_core.cli.terminal.output import logs_json, say

# Without a terminal, seconds between progress lines.
_SECONDS = 5.0
_SHOW_CURSOR = b"\x1b[?25h"
_LABELS = {"load": "loading", "prefill": "reading the prompt"}


class ProgressBars:
    """Progress bars for opening a model, loading it and prefill.

    Without a terminal, a line is written from time to time.
    """

    def __init__(self, *, show: bool, opening: bool = True) -> None:
        """opening: whether to show a bar for opening the model"""
        console = Console(stderr=True)
        terminal = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
        self._terminal = show and terminal and not logs_json()
        self._lines = show and not self._terminal
        self._next_line = time.monotonic() + _SECONDS
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counted]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._terminal,
        )
        self._opening = self._progress.add_task(
            "opening the model", total=None, counted="", visible=opening
        )

    def update(self, what: str, done: int, total: int) -> None:
        """Update a bar. what: "load" or "prefill". done, total: counts of layers"""
        if self._lines and time.monotonic() > self._next_line:
            self._next_line = time.monotonic() + _SECONDS
            about = {"doing": what, "done": done, "of": total}
            say(f"{_LABELS[what]}: {done} of {total} layers", **about)
        if what not in self._tasks:
            self._progress.update(self._opening, visible=False)
            self._tasks[what] = self._progress.add_task(_LABELS[what], total=total, counted="")
        counted = f"{done}/{total} layers"
        self._progress.update(self._tasks[what], completed=done, counted=counted)

    def stop(self) -> None:
        """Remove the bars from the terminal. Repeated calls have no effect."""
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
