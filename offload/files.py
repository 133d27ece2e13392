"""Where a run writes its output: regular files, pipes and devices.

A regular file is replaced only when its new content is complete; symbolic links are followed. A
pipe, a terminal or a device is opened and written to. Output to something that is already open as
standard output, standard error or another numbered descriptor is appended through it and nothing is
replaced.
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
# Names of files being written, which have to be deleted when the process is ended.
_PARTS: set[str] = set()
# Number of characters of a name that go into a temporary name; a file name may have 255 bytes.
_NAMED_BY = 40
# No room or no access: with these errors the existing file is left unchanged.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@dataclass(frozen=True)
class Output:
    """One output of a run.

    path: file to write; "-" is standard output
    what: name of the output in errors
    """

    path: str | Path
    what: str

    def check(self) -> None:
        """Raise UsageError, before any work is done, if the output cannot be written."""
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
        # Root could write to a read-only file, but should not.
        elif not os.access(target, os.W_OK) or not status.st_mode & 0o222:
            raise self._refusal("it is read-only")

    def check_file(self) -> None:
        """Raise UsageError, before any work, unless this is or can become a regular file."""
        self.check()
        if self._descriptor() is not None:
            raise self._refusal("it is no file")
        target, status = self._target()
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise self._refusal("it is no file")
        if not os.access(target.parent, os.W_OK):
            raise self._refusal("its directory is not writable")

    def write(self, content: str | bytes) -> None:
        """Write the whole content, or leave an existing file unchanged. Raises OutputError."""
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
        """Yield a file to write piece by piece, which replaces the target when the block ends. If
        the block fails, the target stays as it was. Only for regular files.

        private: whether only its owner may read a new file

        Raises OutputError.
        """
        partial: str | None = None
        try:
            self.check_file()
            target, status = self._target()
            made, partial = _part(target)
            with open(made, "wb") as file:
                yield file
                # A new temporary file is readable by its owner alone.
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
        """Return a value that is equal for two paths to the same file; None for a device, which may
        be given several times.
        """
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
        """Resolve symbolic links and return the path and its status. Anything but a regular file is
        opened by the given name.
        """
        path = Path(self.path).expanduser()
        try:
            status = path.stat()
            return (path.resolve() if stat.S_ISREG(status.st_mode) else path), status
        except FileNotFoundError:
            return path.resolve(), None
        except (OSError, RuntimeError) as error:
            raise self._refusal(getattr(error, "strerror", None) or str(error)) from error

    def _descriptor(self) -> int | None:
        """Return the descriptor of this process that the path already refers to, or None."""
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
    """Delete the files being written, for a process that is about to end while it writes."""
    for part in tuple(_PARTS):
        _drop(part)


def cache_directory() -> Path:
    """Return the directory for files that this package can create again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "triforce-offload"


def check_outputs(outputs: Iterable[Output], inputs: Iterable[str | Path] = ()) -> None:
    """Raise UsageError if an output cannot be written, if two are the same, or if one is also read.

    inputs: files that the run reads, and directories whose files it reads
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
    """Append to a descriptor of this process."""
    stream = {1: sys.stdout, 2: sys.stderr}.get(descriptor)
    if stream is not None:
        stream.flush()
        if not hasattr(stream, "buffer"):
            # A stand-in for the stream that takes only text.
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
    """Replace a file when its new content is complete, keeping its mode. If the directory does not
    permit that, overwrite the file itself.
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
    """Create a temporary file beside the target and return its descriptor and name. Delete those
    that killed processes left behind.
    """
    # Only those of this machine: a process of another machine may still be alive.
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
    """Return whether a process with this number exists."""
    try:
        os.kill(int(process), 0)
    except PermissionError:
        # The process belongs to another user.
        return True
    except (ValueError, OSError, OverflowError):
        return False
    return True


def _put_in_place(part: str, target: Path) -> None:
    os.replace(part, target)
    _PARTS.discard(part)


def _drop(part: str) -> None:
    """Delete a temporary file that did not replace its target."""
    with suppress(OSError):
        os.unlink(part)
    _PARTS.discard(part)


def _mode(status: os.stat_result | None) -> int:
    if status is not None:
        return stat.S_IMODE(status.st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
