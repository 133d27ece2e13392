"""Tables on standard output, whose reader may close the pipe."""

from __future__ import annotations

from rich.console import Console


class Printer(Console):
    """A console that raises BrokenPipeError when its reader leaves; rich would exit the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
