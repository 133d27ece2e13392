"""Standard output for the generated text, and log lines on standard error."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from typing import IO

from triforce_core.cli.codes import OUTPUT_FAILED, READER_GONE

INFO, WARNING, ERROR = "info", "warning", "error"
_PREFIX = "triforce: "
_as_json = False
_show_warning = warnings.showwarning


def log_lines(*, as_json: bool) -> None:
    """Select the format of lines on standard error, including Python's warnings.

    With `as_json`, each line is a JSON object with `time`, `level`, `message` and further fields.
    """
    global _as_json
    if as_json:
        warnings.showwarning = _say_warning
    elif _as_json:
        warnings.showwarning = _show_warning
    _as_json = as_json


def logs_json() -> bool:
    return _as_json


def terminal_columns(stream: IO[str] | None) -> int | None:
    """Return the width of the terminal behind a stream, or None if it is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def announce(download: object) -> None:
    """Say what is about to be downloaded, with its size and the free space."""
    say(str(download))


def say(line: str, level: str = INFO, **fields: object) -> None:
    """Write a line to standard error, if it is open. fields: extra fields of a JSON line"""
    if _as_json:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        about = {"time": now, "level": level, "message": line.removeprefix(_PREFIX), **fields}
        line = json.dumps(about, default=str)
    if sys.stderr is None:
        # Standard error was closed at startup; `print` would fall back to standard output.
        return
    with suppress(OSError, ValueError, AttributeError):
        print(line, file=sys.stderr, flush=True)


def _say_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    say(str(message), WARNING, category=category.__name__)


class JsonLines(logging.Formatter):
    """A formatter that writes logging records as the JSON lines of `say`."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        about = {
            **{"time": when, "level": record.levelname.lower()},
            **{"message": record.getMessage(), "logger": record.name},
        }
        if record.exc_info:
            about["traceback"] = self.formatException(record.exc_info)
        return json.dumps(about)


# A logging configuration that sends all loggers to standard error as JSON.
JSON_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"json": {"()": f"{__name__}.JsonLines"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
    "root": {"handlers": ["stderr"]},
}


def abandon_stdout() -> None:
    """Redirect standard output to os.devnull, where the rest of its buffer is discarded."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class TextOutput:
    """A writer for standard output that stops at the first failed write and keeps the reason.

    Characters that the encoding of standard output lacks are written as escapes. A stream that
    fails is redirected to os.devnull, so that the interpreter's final flush does not fail. If
    standard output was closed at startup, text is discarded.

    code: the exit code for the process, 0 without an error
    why: a description of the error
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
        """Write text. Return whether it was written."""
        if self.code or sys.stdout is None:
            return not self.code
        try:
            self.escaped |= not _encodable(text)
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self._failed("the reader of the text has gone", READER_GONE)
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
