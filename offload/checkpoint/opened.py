"""Files that are read by position. No file stays mapped: truncating a mapped file kills the
process, while a read of it ends with an error.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

from triforce_offload.errors import CheckpointError

if TYPE_CHECKING:
    import torch


class OpenedFile:
    """A file that stays open. size: its size in bytes when it was opened"""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises CheckpointError."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self.size = os.fstat(self._descriptor).st_size

    def expect(self, start: int, nbytes: int) -> None:
        """Announce that `nbytes` bytes will be read, so that the system reads all of them ahead."""
        os.posix_fadvise(self._descriptor, start, nbytes, os.POSIX_FADV_WILLNEED)

    def fill(self, into: memoryview, start: int, what: str) -> None:
        """Fill a buffer from the file, beginning at byte `start`. what: what is read, for errors

        Raises CheckpointError.
        """
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._descriptor, [into[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {what} from {self.path}: {error}") from error
            if not count:
                raise CheckpointError(
                    f"cannot read {what} from {self.path}: the file ends before it"
                )
            done += count

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class Stored(NamedTuple):
    """A tensor of a safetensors file.

    dtype: name of its dtype in the format
    start: position of its first byte in the file
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class TensorsFile(OpenedFile):
    """A safetensors file.

    stored: its tensors by name
    metadata: strings stored with the file
    header: the bytes that contain both

    The safetensors library checks the header; tensors are read by this class. The library maps
    files writable for torch, which the system refuses for a file that is larger than its memory.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if the header is damaged, or does not belong to this file."""
        super().__init__(path)
        try:
            with safe_open(path, framework="numpy"):
                pass
            begin = bytearray(8)
            self.fill(memoryview(begin), 0, "the header")
            (length,) = struct.unpack("<Q", begin)
            if length > self.size:
                raise CheckpointError(f"cannot read {path}: it changed while it was opened")
            header = bytearray(length)
            self.fill(memoryview(header), len(begin), "the header")
            parts = json.loads(header)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            self.close()
            raise CheckpointError(f"cannot read {path}: {error}") from error
        except BaseException:
            self.close()
            raise
        self.header = bytes(header)
        self.metadata: Mapping[str, str] = parts.pop("__metadata__", None) or {}
        first = len(begin) + length
        self.stored = {
            name: Stored(
                part["dtype"],
                tuple(part["shape"]),
                first + part["data_offsets"][0],
                part["data_offsets"][1] - part["data_offsets"][0],
            )
            for name, part in parts.items()
        }

    def read(self, name: str, into: torch.Tensor) -> None:
        """Fill a contiguous host tensor, as large as the stored tensor of that name, with its
        bytes.

        Raises CheckpointError.
        """
        import torch

        flat = into.view(-1).view(torch.uint8)
        self.fill(memoryview(flat.numpy()), self.stored[name].start, name)
