"""Where a run writes what it gives: files that are whole or not there, pipes, devices.

A regular file is replaced when all of it is written, through symbolic links. A pipe, a terminal or
a device is opened and written to. What a descriptor of this process leads to already, standard
output or error among them, gets it behind what it holds: nothing is replaced under them.
"""

from __future__ import annotations

import errno
import glob
import os
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from triforce_offload.errors import OutputError, UsageError

STANDARD_OUTPUT = "-"
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_NAMED = {"/dev/stdout": 1, "/dev/stderr": 2}
# Names of what is being written, which somebody who ends the process has to delete.
_PARTS: set[str] = set()
# So much of a name is part of another one, which may have 255 bytes.
_NAMED_BY = 40
# With these there is no room, or no way: what is there already is left as it is.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@dataclass(frozen=True)
class Output:
    """One thing that is written. path: "-" is standard output. what: its name, for errors."""

    path: str | Path
    what: str

    def check(self) -> None:
        """Raises UsageError, before any work is done, if this cannot be written."""
        if not str(self.path):
            raise self._refusal("its name is empty")
        descriptor = self._descriptor()
        if descriptor is not None:
            if descriptor == 1 and sys.stdout is None:
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

    def check_file(self) -> None:
        """Raises UsageError, before any work is done, unless this is a file, or may be one."""
        self.check()
        if self._descriptor() is not None:
            raise self._refusal("it is no file")
        target, status = self._target()
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise self._refusal("it is no file")
        if not os.access(target.parent, os.W_OK):
            raise self._refusal("its directory is not writable")

    def write(self, content: str | bytes) -> None:
        """Writes all of it, or leaves a file as it was. Raises OutputError."""
        data = content.encode() if isinstance(content, str) else content
        try:
            descriptor = self._descriptor()
            if descriptor is not None:
                _append(descriptor, data)
                return
            target, status = self._target()
            if status is not None and not stat.S_ISREG(status.st_mode):
                target.write_bytes(data)
            else:
                _replace(target, status, data)
        except UsageError as error:
            raise OutputError(str(error)) from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"cannot write the {self.what} to {self.path}: {reason}") from error

    @contextmanager
    def writing(self, *, private: bool = False) -> Iterator[BinaryIO]:
        """A file to write to piece by piece, which takes its place when the block ends; what was
        there stays if it fails. For regular files alone. private: whether a new file can be read
        by its owner alone. Raises OutputError.
        """
        partial: str | None = None
        try:
            self.check_file()
            target, status = self._target()
            made, partial = _part(target)
            with open(made, "wb") as file:
                yield file
                # A new one was made for its owner alone.
                if status is not None or not private:
                    os.fchmod(file.fileno(), _mode(status))
            _put_in_place(partial, target)
            partial = None
        except UsageError as error:
            raise OutputError(str(error)) from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"cannot write the {self.what} to {self.path}: {reason}") from error
        finally:
            if partial is not None:
                _drop(partial)

    def identity(self) -> object:
        """What two paths to the same thing have in common; None of a device, which takes all."""
        with suppress(OSError):
            path = "/dev/fd/1" if str(self.path) == STANDARD_OUTPUT else self.path
            status = os.stat(path)
            if stat.S_ISCHR(status.st_mode) and str(self.path) != STANDARD_OUTPUT:
                return None
            return status.st_dev, status.st_ino
        with suppress(OSError, RuntimeError):
            return str(Path(self.path).expanduser().resolve())
        return None

    def _target(self) -> tuple[Path, os.stat_result | None]:
        """Where links lead, and what is there. What is no file is opened by the name it has."""
        path = Path(self.path).expanduser()
        try:
            status = path.stat()
            return (path.resolve() if stat.S_ISREG(status.st_mode) else path), status
        except FileNotFoundError:
            return path.resolve(), None
        except (OSError, RuntimeError) as error:
            raise self._refusal(getattr(error, "strerror", None) or str(error)) from error

    def _descriptor(self) -> int | None:
        """The descriptor of this process that leads there already, if one does."""
        name = str(self.path)
        if name == STANDARD_OUTPUT:
            return 1
        if name in _NAMED:
            return _NAMED[name]
        if match := _DESCRIPTOR.fullmatch(name):
            return int(match[1])
        for descriptor in (1, 2):
            with suppress(OSError):
                if os.path.samestat(os.stat(name), os.fstat(descriptor)):
                    return descriptor
        return None

    def _refusal(self, why: str) -> UsageError:
        return UsageError(f"cannot write the {self.what} to {self.path}: {why}")


def drop_parts() -> None:
    """Deletes what is being written. For a process that is about to end in the middle of that."""
    for part in tuple(_PARTS):
        _drop(part)


def cache_directory() -> Path:
    """Where this package keeps what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "triforce-offload"


def check_outputs(outputs: Iterable[Output], inputs: Iterable[str | Path] = ()) -> None:
    """Raises UsageError if one cannot be written, if two are the same, or if one is also read.

    inputs: files that are read in the same run, and directories whose files are
    """
    sources = [Output(path, "input") for path in inputs]
    folders = [_resolved(source.path) for source in sources if _resolved(source.path).is_dir()]
    seen = {source.identity(): source for source in sources}
    for output in outputs:
        output.check()
        for folder in folders:
            target = _resolved(output.path)
            if target.is_file() and target.is_relative_to(folder):
                raise UsageError(
                    f"{output.path} was given for the {output.what} and belongs to {folder}"
                )
        identity = output.identity()
        other = seen.setdefault(identity, output) if identity is not None else output
        if other is not output:
            raise UsageError(
                f"{output.path} was given for the {output.what} and for the {other.what}"
            )


def _resolved(path: str | Path) -> Path:
    path = Path(path).expanduser()
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


def _append(descriptor: int, data: bytes) -> None:
    """Writes to a descriptor of this process, behind what it holds."""
    stream = {1: sys.stdout, 2: sys.stderr}.get(descriptor)
    if stream is not None:
        stream.flush()
        if not hasattr(stream, "buffer"):
            # Some stand-in for it that takes text alone.
            stream.write(data.decode())
            return
        if not _leads_to(stream, descriptor):
            stream.buffer.write(data)
            stream.flush()
            return
    with open(os.dup(descriptor), "wb") as file:
        file.write(data)


def _leads_to(stream: object, descriptor: int) -> bool:
    with suppress(OSError, ValueError):
        return stream.fileno() == descriptor
    return False


def _replace(target: Path, status: os.stat_result | None, data: bytes) -> None:
    """Puts a file in place when all of it is written, with the mode of the one before it. Where the
    directory does not let that be, the file itself is written.
    """
    partial: str | None = None
    try:
        descriptor, partial = _part(target)
        with open(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), _mode(status))
        _put_in_place(partial, target)
    except BaseException as error:
        if partial is not None:
            _drop(partial)
        if status is None or not isinstance(error, OSError) or error.errno in _FULL:
            raise
        target.write_bytes(data)


def _part(target: Path) -> tuple[int, str]:
    """A file beside the one it will replace: its descriptor and its name. What processes that were
    killed have left of such is deleted.
    """
    # Of this machine: whether a process of another one lives cannot be told.
    named = f".{target.name[:_NAMED_BY]}.{platform.node()[:_NAMED_BY]}."
    for left in target.parent.glob(f"{glob.escape(named)}*.partial"):
        if not is_alive(left.name.removeprefix(named).partition(".")[0]):
            with suppress(OSError):
                left.unlink()
    prefix = f"{named}{os.getpid()}."
    descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".partial", dir=target.parent)
    _PARTS.add(name)
    return descriptor, name


def is_alive(process: str) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(int(process), 0)
    except PermissionError:
        # Somebody else's.
        return True
    except (ValueError, OSError, OverflowError):
        return False
    return True


def _put_in_place(part: str, target: Path) -> None:
    os.replace(part, target)
    _PARTS.discard(part)


def _drop(part: str) -> None:
    """Deletes what has not taken its place."""
    with suppress(OSError):
        os.unlink(part)
    _PARTS.discard(part)


def _mode(status: os.stat_result | None) -> int:
    if status is not None:
        return stat.S_IMODE(status.st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
