"""Standard output, where the generated text goes, and lines on standard error."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import warnings
from contextlib import suppress
from datetime import UTC, datetime

from triforce_core.cli.codes import OUTPUT_FAILED, READER_GONE

INFO, WARNING, ERROR = "info", "warning", "error"
_PREFIX = "triforce: "
_as_json = False
_show_warning = warnings.showwarning


def log_lines(*, as_json: bool) -> None:
    """How what is said on standard error looks from now on: text, or a JSON object a line with
    `time`, `level`, `message` and what else belongs to it. Python's warnings too.
    """
    global _as_json
    if as_json:
        warnings.showwarning = _say_warning
    elif _as_json:
        warnings.showwarning = _show_warning
    _as_json = as_json


def logs_json() -> bool:
    return _as_json


def say(line: str, level: str = INFO, **fields: object) -> None:
    """A line on standard error, if anybody is there. fields: told in JSON alone"""
    if _as_json:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        about = {"time": now, "level": level, "message": line.removeprefix(_PREFIX), **fields}
        line = json.dumps(about, default=str)
    if sys.stderr is None:
        # Closed from the start: `print` would take standard output in its place.
        return
    with suppress(OSError, ValueError, AttributeError):
        print(line, file=sys.stderr, flush=True)


def _say_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    say(str(message), WARNING, category=category.__name__)


class JsonLines(logging.Formatter):
    """Records of a logger as `say` has them in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        about = {
            **{"time": when, "level": record.levelname.lower()},
            **{"message": record.getMessage(), "logger": record.name},
        }
        if record.exc_info:
            about["traceback"] = self.formatException(record.exc_info)
        return json.dumps(about)


# For who takes a configuration of loggers: all of them, as JSON on standard error.
JSON_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"json": {"()": f"{__name__}.JsonLines"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
    "root": {"handlers": ["stderr"]},
}


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
