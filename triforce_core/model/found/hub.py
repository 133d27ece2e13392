"""Models of the Hugging Face hub: those in its cache, and downloads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triforce_core.model.checkpoints.drafters.found import head_at
from triforce_core.model.families.hf import from_hf
from triforce_core.model.found.folders import CONFIG
from triforce_core.model.found.quantisations import files_of
from triforce_offload.checkpoint.header import read_json
from triforce_offload.errors import CheckpointError, DoesNotFitError, TriforceError, UsageError
from triforce_offload.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub.file_download import DryRunFileInfo

# Files of a model that are not weights.
_HEADERS = ["*.json", "*.model", "*.txt", "*.jinja"]
_SAFETENSORS, _GGUF = "*.safetensors", "*.gguf"
# Heads alone are read from such files.
_OF_TORCH = "pytorch_model.bin"
# Some repositories hold copies of the same weights in other layouts.
_IGNORED = ["consolidated*", "*/*"]


@dataclass(frozen=True)
class Download:
    """A download that is about to begin.

    nbytes: size of the files that are not in the cache yet
    folder: the cache
    free_bytes: free space on its disk
    """

    name: str
    nbytes: int
    folder: Path
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"downloading {self.name}: {format_bytes(self.nbytes)} to {self.folder}, "
            f"where {format_bytes(self.free_bytes)} are free"
        )


Announce = Callable[[Download], None]


def downloaded(name: str, announce: Announce) -> Path:
    """Return the directory of a hub id's files, or its GGUF file, and download what is missing.

    name: a hub id, with a quantisation behind a colon or without
    announce: called before weights are downloaded, with their size
    Raises CheckpointError, UnsupportedModelError or UsageError before any weights, or
    DoesNotFitError.
    """
    repository, colon, wanted = name.partition(":")
    try:
        if colon:
            return _gguf(repository, wanted, announce)
        return _folder(repository, announce)
    except TriforceError:
        raise
    except Exception as error:
        # The hub's own errors begin with a line that has the status and the id of the request.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        useful = [line for line in lines if not re.match(r"\d{3} \w+ Error", line)]
        reason = (useful or lines or [type(error).__name__])[0].removeprefix("Got: ")
        raise CheckpointError(
            f"cannot download {repository} from the hub: {reason} (a file or a folder on this "
            "machine needs no hub)"
        ) from error


def _folder(name: str, announce: Announce) -> Path:
    """Download what is missing of a model in safetensors, or of the usual GGUF file of a repository
    that has no others.
    """
    from huggingface_hub import snapshot_download

    snapshot = snapshot_download(name, allow_patterns=_HEADERS, ignore_patterns=_IGNORED)
    if _has_only_gguf(name, Path(snapshot)):
        return _gguf(name, "", announce)
    files = [*_HEADERS, _SAFETENSORS]
    if head_at(Path(snapshot)) is None:
        from_hf(read_json(Path(snapshot) / CONFIG), {})
    elif not (_has_safetensors(Path(snapshot)) or _planned(name, [_SAFETENSORS])):
        # Many heads are published in this format alone.
        files.append(_OF_TORCH)
    _announce(name, _planned(name, files), announce)
    return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=_IGNORED))


def _has_only_gguf(name: str, snapshot: Path) -> bool:
    """Whether a repository has GGUF files and no weights in another format.

    snapshot: its folder in the cache, with its config.json, if it has one
    """
    if _is_model(snapshot):
        return False
    if (snapshot / CONFIG).exists() and _planned(name, [_SAFETENSORS, _OF_TORCH]):
        return False
    return bool(_planned(name, [_GGUF], ignored=None)) or any(snapshot.rglob(_GGUF))


def _gguf(name: str, wanted: str, announce: Announce) -> Path:
    """Download what is missing of a GGUF file, or of its parts. Return the first."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, allow_patterns=[_GGUF], dry_run=True)
    except Exception:
        if (path := _cached_gguf(name, wanted)) is None:
            raise
        return path
    planned = {each.filename: each for each in found}
    files = files_of(name, planned, wanted)
    _announce(f"{name} ({files[0]})", [planned[each] for each in files], announce)
    return Path(snapshot_download(name, allow_patterns=files)) / files[0]


def cached(name: str) -> Path | None:
    """Return the directory of a hub id if its config and weights are in the cache, or its GGUF
    file, else None. name: see `downloaded`
    """
    repository, colon, wanted = name.partition(":")
    if repository.count("/") != 1:
        return None
    if not colon:
        # Only files that `downloaded` asks for: others of the repository need not be there.
        folder = _in_cache(repository, [*_HEADERS, _SAFETENSORS], ignored=_IGNORED)
        if folder is not None and _is_model(folder):
            return folder
    return _cached_gguf(repository, wanted)


def _cached_gguf(name: str, wanted: str) -> Path | None:
    """Return the first file of a quantisation that is in the cache, None if it is not."""
    folder = _in_cache(name, [_GGUF])
    if folder is None:
        return None
    held = [str(path.relative_to(folder)) for path in folder.rglob(_GGUF)]
    with suppress(UsageError):
        return folder / files_of(name, held, wanted)[0]
    return None


def _in_cache(name: str, files: list[str], ignored: list[str] | None = None) -> Path | None:
    """Return the folder of a repository in the cache, None if it is not there."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name, allow_patterns=files, ignore_patterns=ignored, local_files_only=True
        )
    except Exception:
        return None
    return Path(folder)


def cached_models() -> Iterator[tuple[str, Path]]:
    """Yield the hub ids and directories of models in the cache, and the paths of GGUF files."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(cache_folder()).repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id.lower()):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda each: each.last_modified)
        if _is_model(newest.snapshot_path):
            yield repository.repo_id, newest.snapshot_path
        for path in sorted(newest.snapshot_path.rglob(_GGUF)):
            yield str(path), path


def cache_folder() -> Path:
    """Return the folder of the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _has_safetensors(folder: Path) -> bool:
    return any(folder.glob(_SAFETENSORS))


def _is_model(folder: Path) -> bool:
    if not (folder / CONFIG).exists():
        return False
    if _has_safetensors(folder):
        return True
    try:
        return (folder / _OF_TORCH).exists() and head_at(folder) is not None
    except CheckpointError:
        return False


def _planned(
    name: str, files: list[str], *, ignored: list[str] | None = _IGNORED
) -> list[DryRunFileInfo]:
    """Return what the hub has of these files, also of those that are in the cache. Without the hub
    there are none, and what is in the cache is used.
    """
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=files, ignore_patterns=ignored, dry_run=True)
    except Exception:
        return []


def _announce(name: str, planned: list[DryRunFileInfo], announce: Announce) -> None:
    """Announce a download if anything is missing. Raises DoesNotFitError for a full disk."""
    nbytes = sum(each.file_size or 0 for each in planned if each.will_download)
    if not nbytes:
        return
    folder = cache_folder()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    download = Download(name, nbytes, folder, shutil.disk_usage(there).free)
    announce(download)
    if download.free_bytes < nbytes:
        raise DoesNotFitError(
            f"the download of {name} to {folder}",
            nbytes,
            download.free_bytes,
            "set HF_HOME to a folder with more room",
        )
