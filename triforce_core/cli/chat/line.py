"""Lines that a person types, with a history and an editor where there is a terminal."""

from __future__ import annotations

import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from triforce_offload.errors import UsageError


class Lines:
    """Standard input, line by line.

    terminal: whether a person types them
    """

    def __init__(self) -> None:
        if sys.stdin is None:
            raise UsageError("standard input is closed: there is nobody to talk to")
        self.terminal = sys.stdin.isatty() and sys.stderr is not None and sys.stderr.isatty()
        self._session = None
        # Of the terminal, while what is typed is held.
        self._modes: list[Any] | None = None
        if self.terminal:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.output import create_output

            # Standard output is for what the model says.
            self._session = PromptSession(output=create_output(stdout=sys.stderr))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, what a person types is not shown. The next `read` takes it, after Ctrl-C too."""
        if self._session is not None and self._modes is None:
            with suppress(termios.error):
                modes = termios.tcgetattr(sys.stdin)
                held = modes.copy()
                # Local modes: no echo, and no interrupt drops what was typed.
                held[3] = held[3] & ~termios.ECHO | termios.NOFLSH
                self._modes = modes
                termios.tcsetattr(sys.stdin, termios.TCSANOW, held)
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Leaves the terminal as it was."""
        if self._modes is not None:
            with suppress(termios.error, ValueError):
                termios.tcsetattr(sys.stdin, termios.TCSANOW, self._modes)
            self._modes = None

    def read(self, status: Callable[[], str]) -> str | None:
        """The next line, None when they end. status: what is shown below it."""
        if self._session is None:
            try:
                line = sys.stdin.readline()
            except ValueError as error:
                raise UsageError(f"standard input is no text: {error}") from error
            return line.removeprefix("\ufeff") if line else None
        while True:
            try:
                return self._session.prompt("> ", bottom_toolbar=status)
            except KeyboardInterrupt:
                # What was typed is dropped, as in a shell.
                continue
            except EOFError:
                return None
