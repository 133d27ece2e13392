"""Tables on standard output, where a reader may leave."""

from __future__ import annotations

from rich.console import Console


class Printer(Console):
    """A console whose reader's leaving is an error like any other; rich ends the process itself."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
