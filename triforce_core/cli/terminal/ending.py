"""Immediate exit on signals, from startup on. This module imports next to nothing."""

import os
import signal
import sys

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


def exit_code(number: int) -> int:
    """Return the shell's exit code for a signal, such as 130 for an interrupt."""
    return 128 + number


def leave(number: int, frame: object = None) -> None:
    """End the process for a signal, as `leave_with` does."""
    leave_with(exit_code(number))


def leave_with(code: int) -> None:
    """End the process immediately, after flushing standard output and removing partial files."""
    # Signal handlers run between any two steps of Python code, so no error here may stop the exit.
    try:
        sys.stdout.flush()
        # If the module is not loaded, no file is being written.
        if files := sys.modules.get("triforce_offload.files"):
            files.drop_parts()
    except Exception:
        pass
    os._exit(code)


def heeded() -> list[int]:
    """Return the signals in SIGNALS that are not ignored, as `nohup` ignores SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def leave_at_once() -> None:
    """Make signals end the process without a traceback. Ignored signals stay ignored."""
    for number in heeded():
        signal.signal(number, leave)
