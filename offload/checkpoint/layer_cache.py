"""A disk cache of layers made from a checkpoint, kept from run to run: one file for each layer.

A directory belongs to one checkpoint, in the present state of its files, and to one recipe. A file
gets its name when it is complete, so a killed process never leaves a partial file under that name.
A cache that cannot be read or written is ignored, because it only saves time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

import torch
from safetensors.torch import save

from triforce_offload.checkpoint.opened import TensorsFile
from triforce_offload.errors import CheckpointError
from triforce_offload.files import is_alive

_NAME = "layer"
_PARTIAL = ".partial"


class LayerCache:
    """A cache of one flat uint8 buffer for each layer."""

    def __init__(self, root: Path, recipe: str, files: Iterable[Path]) -> None:
        """root: directory of all such caches
        recipe: how the layers are made, in a few words
        files: files of the checkpoint; caches made from an earlier state of these files are deleted
        """
        files = sorted(path.resolve() for path in files)
        which = _digest(recipe, *files)
        self._directory = root / f"{which}-{_digest(*map(_state, files))}"
        self._lock = threading.Lock()
        self._off = False
        with suppress(OSError):
            for other in root.glob(f"{which}-*"):
                if other != self._directory:
                    shutil.rmtree(other, ignore_errors=True)
            for partial in self._directory.glob(f"*{_PARTIAL}"):
                if not is_alive(partial.name.split(".")[-3]):
                    partial.unlink()

    def read(self, layer: int, into: torch.Tensor) -> bool:
        """Fill a buffer if the cache has one of this size for the layer. Return whether it has."""
        with suppress(CheckpointError), closing(TensorsFile(self._file(layer))) as file:
            kept = file.stored.get(_NAME)
            if kept and kept.dtype == "U8" and kept.shape == tuple(into.shape):
                buffer = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
                file.read(_NAME, buffer)
                if buffer is not into:
                    into.copy_(buffer)
                return True
        return False

    def write(self, layer: int, buffer: torch.Tensor) -> None:
        """Write a buffer to the cache. After a first failure, which warns, this does nothing."""
        if self._off:
            return
        target, partial = self._file(layer), None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # An unpredictable name, so that nobody could have put a link there.
            descriptor, partial = tempfile.mkstemp(
                prefix=f"{target.name}.{os.getpid()}.", suffix=_PARTIAL, dir=self._directory
            )
            with open(descriptor, "wb") as file:
                file.write(save({_NAME: buffer.cpu()}))
            os.replace(partial, target)
        except OSError as error:
            if partial is not None:
                with suppress(OSError):
                    os.unlink(partial)
            with self._lock:
                if not self._off:
                    self._off = True
                    warnings.warn(
                        f"draft copies are made anew in each run, since {self._directory} cannot "
                        f"be written: {error.strerror or error}",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def _file(self, layer: int) -> Path:
        return self._directory / f"{layer:03d}.safetensors"


def _state(path: Path) -> str:
    """Return a string that changes when the file is written to."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
