"""Values that identify a file, and that change when it is written to."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from triforce_offload.errors import CheckpointError

# Number and size of the samples of a file that identify it.
_SAMPLES, _SAMPLE_BYTES = 512, 64


def sampled(path: Path) -> str:
    """Return the size and a checksum of samples from all over a file. Raises CheckpointError."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            starts = (size * i // _SAMPLES for i in range(_SAMPLES))
            parts = [os.pread(file.fileno(), _SAMPLE_BYTES, start) for start in starts]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return f"{size}:{zlib.crc32(b''.join(parts)):08x}"


def state(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is written to; None if the file does not exist."""
    try:
        status = path.stat()
    except OSError:
        # A deleted file stays readable for a process that has mapped it.
        return None
    return status.st_size, status.st_mtime_ns
