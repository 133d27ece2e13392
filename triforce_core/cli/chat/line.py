"""Line input, with a history and an editor in a terminal."""

from __future__ import annotations

import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from triforce_core.model.tokenizing.tokenizer import check_text
from triforce_offload.errors import UsageError

_QUOTES = '"""'


def whole(line: str, read_more: Callable[[], str | None]) -> tuple[str, bool]:
    """Return the message that begins with a line, and whether it is quoted, so no command.

    Three quotes begin and end a message of several lines. A backslash at the end of a line adds
    the next line to the message.

    read_more: returns another line, or None at the end of the input, which ends the message
    """
    if line.strip().startswith(_QUOTES):
        lines, rest = [], line.strip().removeprefix(_QUOTES)
        while not rest.rstrip().endswith(_QUOTES):
            lines.append(rest.rstrip("\n"))
            if (more := read_more()) is None:
                return "\n".join(lines).strip("\n"), True
            rest = more
        lines.append(rest.rstrip().removesuffix(_QUOTES))
        return "\n".join(lines).strip("\n"), True
    lines = [line.rstrip("\n")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        if (more := read_more()) is None:
            break
        lines.append(more.rstrip("\n"))
    return "\n".join(lines), False


class OneMessage:
    """One message, in place of lines.

    terminal: as of `Lines`
    """

    terminal = False

    def __init__(self, text: str) -> None:
        """Raises UsageError if the text is blank."""
        if not text.strip():
            raise UsageError("the prompt is empty")
        check_text(text, "prompt")
        self._text: str | None = text

    def held(self) -> AbstractContextManager[None]:
        """Lines.held. There is no terminal to change."""
        return nullcontext()

    def give_back(self) -> None:
        """Lines.give_back."""

    def read(self, status: Callable[[], str], *, goes_on: bool = False) -> str | None:
        """Lines.read."""
        text, self._text = self._text, None
        return text


class Lines:
    """Standard input, line by line.

    terminal: whether the input is a terminal
    """

    def __init__(self) -> None:
        if sys.stdin is None:
            raise UsageError("standard input is closed: there is nobody to talk to")
        self.terminal = sys.stdin.isatty() and sys.stderr is not None and sys.stderr.isatty()
        self._session = None
        # The terminal's modes before `held` changed them, or None.
        self._modes: list[Any] | None = None
        if self.terminal:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.output import create_output

            # Standard output is reserved for the model's text.
            self._session = PromptSession(output=create_output(stdout=sys.stderr))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep typed characters hidden and unread, even across Ctrl-C, until the next `read`."""
        if self._session is not None and self._modes is None:
            with suppress(termios.error):
                modes = termios.tcgetattr(sys.stdin)
                held = modes.copy()
                # Local modes: turn echo off, and keep typed characters on an interrupt.
                held[3] = held[3] & ~termios.ECHO | termios.NOFLSH
                self._modes = modes
                termios.tcsetattr(sys.stdin, termios.TCSANOW, held)
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Restore the terminal's modes."""
        if self._modes is not None:
            with suppress(termios.error, ValueError):
                termios.tcsetattr(sys.stdin, termios.TCSANOW, self._modes)
            self._modes = None

    def read(self, status: Callable[[], str], *, goes_on: bool = False) -> str | None:
        """Return the next line, or None at the end of the input.

        status: the text shown below the line
        goes_on: whether the line continues a message, which Ctrl-C discards: KeyboardInterrupt
        """
        if self._session is None:
            try:
                line = sys.stdin.readline()
            except ValueError as error:
                raise UsageError(f"standard input is no text: {error}") from error
            return line.removeprefix("\ufeff") if line else None
        while True:
            try:
                shown = "... " if goes_on else "> "
                return self._session.prompt(shown, bottom_toolbar=status)
            except KeyboardInterrupt:
                if goes_on:
                    raise
                # Discard the typed text, as shells do.
                continue
            except EOFError:
                return None
