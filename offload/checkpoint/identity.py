"""What tells one file from another, and from itself after it was written to."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from triforce_offload.errors import CheckpointError

# Of a file by which it is told from others.
_SAMPLES, _SAMPLE_BYTES = 512, 64


def sampled(path: Path) -> str:
    """Size and a checksum of bytes from all over a file. Raises CheckpointError."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            starts = (size * i // _SAMPLES for i in range(_SAMPLES))
            parts = [os.pread(file.fileno(), _SAMPLE_BYTES, start) for start in starts]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return f"{size}:{zlib.crc32(b''.join(parts)):08x}"


def state(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written to."""
    try:
        status = path.stat()
    except OSError:
        # What was deleted stays mapped.
        return None
    return status.st_size, status.st_mtime_ns
