"""Standard output, where the generated text goes."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

from triforce_core.cli.codes import OUTPUT_FAILED, READER_GONE


def say(line: str) -> None:
    """A line on standard error, if anybody is there."""
    with suppress(OSError, AttributeError):
        print(line, file=sys.stderr, flush=True)


def abandon_stdout() -> None:
    """Points standard output to nowhere, where what is left in its buffer can go."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class TextOutput:
    """Takes text until a write fails; then says why and takes no more.

    Characters that standard output's encoding lacks are written as escapes. A stream that failed
    is pointed elsewhere, so that the interpreter's last flush fails for nobody. One that was closed
    from the start takes everything, to nowhere.

    code: what the process should end with, 0 while all is well; why: what is wrong, in words
    """

    def __init__(self) -> None:
        self.code = 0
        self.why = ""
        self.escaped = False
        if sys.stdout is None:
            self.why = "standard output is closed"
        elif hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> bool:
        """Whether the text got there."""
        if self.code or sys.stdout is None:
            return not self.code
        try:
            self.escaped |= not _encodable(text)
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self._failed("whoever read the text has gone", READER_GONE)
        except OSError as error:
            gone = error.errno in (errno.EPIPE, errno.ECONNRESET)
            reason = f"standard output takes no more text: {error.strerror or error}"
            self._failed(reason, READER_GONE if gone else OUTPUT_FAILED)
        return not self.code

    def _failed(self, why: str, code: int) -> None:
        self.why, self.code = why, code
        abandon_stdout()


def _encodable(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
