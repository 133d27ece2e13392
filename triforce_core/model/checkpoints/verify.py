"""Verification of a model on disk: its headers, its files and its numbers."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_offload.checkpoint.opened import TensorsFile
from triforce_offload.errors import CheckpointError

# Name of a file in the hub's cache, which is its hash.
_HASH = re.compile(r"[0-9a-f]{64}")
_SUMS = "SHA256SUMS"
_BYTES = 1 << 24


def findings(path: Path, progress: Callable[[str], None] = lambda what: None) -> Iterator[str]:
    """Yield a sentence for each fault of a model.

    Checks headers and shapes against the config, tensors that occur in two files, recorded hashes
    of files (in the hub's cache, or in SHA256SUMS beside the files), and non-finite numbers.

    progress: called with the name of each item to be checked
    Raises UsageError if `path` is not a model at all, and CheckpointError if it cannot be opened.
    """
    with closing(open_checkpoint(path, checked=False)) as checkpoint:
        yield from map(str, checkpoint.faults())
        yield from _twice(checkpoint.files)
        recorded = _recorded(path if path.is_dir() else path.parent)
        for file in checkpoint.files:
            expected = recorded.get(file.name) or _hash_in_name(file)
            if expected:
                progress(f"hash of {file.name}")
                if (found := _sha256(file)) != expected:
                    yield f"{file}: its SHA-256 is {found}, and {expected} is recorded"
        try:
            for name, numbers in checkpoint.stored():
                progress(name)
                wrong = numbers.numel() - int(numbers.isfinite().sum())
                if wrong:
                    yield f"{path}: {wrong} of {numbers.numel()} numbers of {name} are not finite"
        except CheckpointError as error:
            yield str(error)


def _twice(paths: list[Path]) -> Iterator[str]:
    """Yield a sentence for each tensor that occurs in several safetensors files."""
    held: Counter[str] = Counter()
    for file in paths:
        if file.suffix == ".safetensors":
            try:
                with closing(TensorsFile(file)) as opened:
                    held.update(opened.stored.keys())
            except CheckpointError as error:
                yield str(error)
    for name, count in sorted(held.items()):
        if count > 1:
            yield f"{paths[0].parent}: {count} files hold {name}"


def _recorded(folder: Path) -> dict[str, str]:
    """Return the hashes in SHA256SUMS by file name."""
    try:
        lines = (folder / _SUMS).read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    parts = [line.split(maxsplit=1) for line in lines]
    return {part[1].lstrip("*"): part[0].lower() for part in parts if len(part) == 2}


def _hash_in_name(file: Path) -> str | None:
    target = file.resolve()
    in_cache = target.parent.name == "blobs" and _HASH.fullmatch(target.name)
    return target.name if in_cache else None


def _sha256(file: Path) -> str:
    made = hashlib.sha256()
    with open(file, "rb") as opened:
        while part := opened.read(_BYTES):
            made.update(part)
    return made.hexdigest()
