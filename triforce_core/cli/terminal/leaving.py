"""Leaving at once when a signal comes, from the first moment on: this imports next to nothing."""

import os
import signal
import sys

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


def exit_code(number: int) -> int:
    """The code of a process that a signal ended, as shells have it: 130 for an interrupt."""
    return 128 + number


def leave(number: int, frame: object = None) -> None:
    """Ends the process for a signal: see `leave_with`."""
    leave_with(exit_code(number))


def leave_with(code: int) -> None:
    """Ends the process at once. What was written to standard output so far gets there, and of a
    file that is being written no part stays.
    """
    # Python lets a signal in between any two steps, and of what these do nothing may keep it here.
    try:
        sys.stdout.flush()
        # If it was not loaded yet nothing has been written.
        if files := sys.modules.get("triforce_offload.files"):
            files.drop_parts()
    except Exception:
        pass
    os._exit(code)


def heeded() -> list[int]:
    """Signals but for those that whoever started this process had ignored, as `nohup` does."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def leave_at_once() -> None:
    """From now on signals end the process: no traceback out of the middle of an import. Those that
    are ignored stay ignored.
    """
    for number in heeded():
        signal.signal(number, leave)
