"""Bars on stderr for what a person waits for before the first token."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_LABELS = {"load": "loading", "prefill": "reading the prompt"}


class ProgressBars:
    """Bars for opening a model, loading it and prefill, shown only on a terminal."""

    def __init__(self, *, show: bool) -> None:
        console = Console(stderr=True)
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counted]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not (show and console.is_terminal) or console.is_dumb_terminal,
        )
        self._opening = self._progress.add_task("opening the model", total=None, counted="")

    def update(self, what: str, done: int, total: int) -> None:
        """what: "load" or "prefill", of which so many layers are done."""
        if what not in self._tasks:
            self._progress.update(self._opening, visible=False)
            self._tasks[what] = self._progress.add_task(_LABELS[what], total=total, counted="")
        counted = f"{done}/{total} layers"
        self._progress.update(self._tasks[what], completed=done, counted=counted)

    def stop(self) -> None:
        """Takes the bars off the terminal; more than once is no harm."""
        self._progress.stop()

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
