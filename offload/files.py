"""Where a run writes what it gives: files that are whole or not there, pipes, devices.

A regular file is replaced when all of it is written, through symbolic links. A pipe, a terminal or
a device is opened and written to. What standard output is already gets it behind what that holds.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.errors import OutputError, UsageError

STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class Output:
    """One thing that is written. path: "-" is standard output. what: its name, for errors."""

    path: str | Path
    what: str

    def check(self) -> None:
        """Raises UsageError, before any work is done, if this cannot be written."""
        if self._is_standard_output():
            if sys.stdout is None:
                raise self._refusal("standard output is closed")
            return
        target, status = self._target()
        if status is None:
            if not os.access(target.parent, os.W_OK):
                raise self._refusal("its directory is missing or not writable")
        elif stat.S_ISDIR(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            raise self._refusal("it is a directory or a socket")
        # Root may write to a file that nobody may, and would not want to.
        elif not os.access(target, os.W_OK) or not status.st_mode & 0o222:
            raise self._refusal("it is read-only")

    def write(self, content: str | bytes) -> None:
        """Writes all of it, or leaves a file as it was. Raises OutputError."""
        data = content.encode() if isinstance(content, str) else content
        try:
            if self._is_standard_output():
                _to_standard_output(data)
                return
            target, status = self._target()
            if status is not None and not stat.S_ISREG(status.st_mode):
                with open(target, "wb", buffering=0) as device:
                    device.write(data)
            else:
                _replace(target, status, data)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"cannot write the {self.what} to {self.path}: {reason}") from error

    def identity(self) -> object:
        """What two paths to the same thing have in common."""
        if self._is_standard_output():
            return STANDARD_OUTPUT
        target, status = self._target()
        return str(target) if status is None else (status.st_dev, status.st_ino)

    def _target(self) -> tuple[Path, os.stat_result | None]:
        """Where links lead, and what is there."""
        try:
            target = Path(self.path).expanduser().resolve()
            return target, target.stat()
        except FileNotFoundError:
            return target, None
        except (OSError, RuntimeError) as error:
            raise self._refusal(getattr(error, "strerror", None) or str(error)) from error

    def _is_standard_output(self) -> bool:
        if str(self.path) == STANDARD_OUTPUT:
            return True
        # Such as /dev/stdout, or the file that the text goes to: it is not replaced under it.
        with suppress(OSError, AttributeError, ValueError):
            return os.path.samestat(os.stat(self.path), os.fstat(sys.stdout.fileno()))
        return False

    def _refusal(self, why: str) -> UsageError:
        return UsageError(f"cannot write the {self.what} to {self.path}: {why}")


def check_outputs(outputs: Iterable[Output], inputs: Iterable[str | Path] = ()) -> None:
    """Raises UsageError if one cannot be written, if two are the same, or if one is also read.

    inputs: files that are read in the same run
    """
    seen: dict[object, Output] = {}
    for given in inputs:
        source = Output(given, "input")
        seen[source.identity()] = source
    for output in outputs:
        output.check()
        other = seen.setdefault(output.identity(), output)
        if other is not output:
            raise UsageError(
                f"{output.path} was given for the {output.what} and for the {other.what}"
            )


def _to_standard_output(data: bytes) -> None:
    sys.stdout.flush()
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:
        # Some stand-in for it that takes text alone.
        sys.stdout.write(data.decode())
    else:
        binary.write(data)
    sys.stdout.flush()


def _replace(target: Path, status: os.stat_result | None, data: bytes) -> None:
    """Puts a file in place when all of it is written, with the mode of the one before it."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except PermissionError:
        if status is None:
            raise
        # A directory that takes no new files: the file itself is all there is.
        target.write_bytes(data)
        return
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            if status is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
