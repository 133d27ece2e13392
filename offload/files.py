"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from offload.errors import UsageError


def check_writable(path: Path) -> None:
    """Raises UsageError, before any work is done, if a file cannot be written there."""
    if path.is_dir():
        raise UsageError(f"cannot write to {path}: it is a directory")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write to {path}: its directory is missing or not writable")


def write_whole(path: str | Path, text: str, what: str) -> None:
    """Puts the file in place when all of it is written. Raises UsageError, which names `what`."""
    partial = Path(f"{path}.partial")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UsageError(f"cannot write the {what} to {path}: {error}") from error
