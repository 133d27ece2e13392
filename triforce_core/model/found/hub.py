"""Models of the Hugging Face hub: those in its cache, and downloads."""

from __future__ import annotations

import glob
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce_core.model.checkpoints.drafters.found import head_at
from triforce_core.model.families.hf import from_hf
from triforce_core.model.found.folders import CONFIG, models_in
from triforce_core.model.found.quantisations import files_of, name_of
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
    Without the hub, return what is in the cache.

    name: a hub id, with a quantisation behind a colon or without
    announce: called before weights are downloaded, with their size
    Raises CheckpointError, UnsupportedModelError or UsageError before any weights, or
    DoesNotFitError.
    """
    from huggingface_hub import HfApi

    repository, colon, wanted = name.partition(":")
    try:
        # `list_repo_files` would try again for half a minute without a network.
        held = [each.rfilename for each in HfApi().model_info(repository).siblings or ()]
    except Exception as error:
        if (path := cached(name)) is not None:
            return path
        raise _refused(repository, error) from error
    try:
        if colon or _has_only_gguf(held):
            return _gguf(repository, files_of(repository, held, wanted), announce)
        return _folder(repository, held, announce)
    except TriforceError:
        raise
    except Exception as error:
        raise _refused(repository, error) from error


def _refused(name: str, error: Exception) -> CheckpointError:
    """Return what says why a download failed."""
    from huggingface_hub.errors import DryRunError, GatedRepoError, RepositoryNotFoundError

    if isinstance(error, DryRunError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    # The hub's own errors begin with a line that has the status and the id of the request.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if not re.match(r"\d{3} \w+ Error", line)]
    reason = (useful or lines or [type(error).__name__])[0].removeprefix("Got: ")
    if isinstance(error, GatedRepoError):
        reason = "its publisher asks for consent: give it on the hub's page, and set HF_TOKEN"
    elif isinstance(error, RepositoryNotFoundError):
        reason = "there is no such repository, or it is private (HF_TOKEN opens those of yours)"
    return CheckpointError(
        f"cannot download {name} from the hub: {reason} (a file or a folder on this machine needs "
        "no hub)"
    )


def _folder(name: str, held: list[str], announce: Announce) -> Path:
    """Download what is missing of a model in safetensors, or of a head. held: all files"""
    from huggingface_hub import snapshot_download

    if CONFIG not in held:
        raise CheckpointError(f"{name} on the hub is no model: it has no {CONFIG} and no GGUF file")
    snapshot = Path(snapshot_download(name, allow_patterns=_HEADERS, ignore_patterns=_IGNORED))
    files = [*_HEADERS, _SAFETENSORS]
    if head_at(snapshot) is None:
        from_hf(read_json(snapshot / CONFIG), {})
    elif not _in_safetensors(held):
        # Many heads are published in this format alone.
        files.append(_OF_TORCH)
    return _files(name, files, name, announce, ignored=_IGNORED)


def _gguf(name: str, files: list[str], announce: Announce) -> Path:
    """Download what is missing of a GGUF file, or of its parts. Return the first."""
    patterns = [glob.escape(each) for each in files]
    return _files(name, patterns, f"{name} ({files[0]})", announce) / files[0]


def _files(
    name: str,
    files: list[str],
    what: str,
    announce: Announce,
    ignored: list[str] | None = None,
) -> Path:
    """Download what is missing of some files, and return the folder that they are in."""
    from huggingface_hub import snapshot_download

    patterns: dict[str, Any] = {"allow_patterns": files, "ignore_patterns": ignored}
    _announce(what, snapshot_download(name, **patterns, dry_run=True), announce)
    return Path(snapshot_download(name, **patterns))


def _has_only_gguf(held: list[str]) -> bool:
    """Whether a repository has GGUF files and no weights in another format."""
    others = _in_safetensors(held) or (_OF_TORCH in held and CONFIG in held)
    return not others and any(file.lower().endswith(".gguf") for file in held)


def _in_safetensors(held: list[str]) -> bool:
    return any(
        file.endswith(".safetensors") and not any(fnmatch(file, each) for each in _IGNORED)
        for file in held
    )


def cached(name: str) -> Path | None:
    """Return the directory of a hub id if its config and weights are in the cache, or its GGUF
    file, else None. name: see `downloaded`
    """
    repository, colon, wanted = name.partition(":")
    if repository.count("/") != 1:
        return None
    if not colon and (folder := _cached_folder(repository)) is not None:
        return folder
    for snapshot in _snapshots(repository):
        held = _gguf_files(snapshot)
        with suppress(UsageError):
            return snapshot / files_of(repository, held, wanted)[0]
    return None


def _cached_folder(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        # Only files that `downloaded` asks for: others of the repository need not be there.
        folder = Path(
            snapshot_download(
                name,
                allow_patterns=[*_HEADERS, _SAFETENSORS],
                ignore_patterns=_IGNORED,
                local_files_only=True,
            )
        )
    except Exception:
        return None
    return folder if _is_model(folder) else None


def _snapshots(name: str) -> list[Path]:
    """Return the folders of a repository in the cache, one for each of its commits of which it has
    files, the newest first.
    """
    from huggingface_hub.file_download import repo_folder_name

    folder = cache_folder() / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    return sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)


def _gguf_files(snapshot: Path) -> list[str]:
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob(_GGUF)]


def cached_models() -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of models in the cache. A GGUF file that has no other name is
    called by its path.
    """
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
        held = _gguf_files(newest.snapshot_path)
        for path in models_in(newest.snapshot_path, 2):
            if path.suffix == ".gguf":
                file = path.relative_to(newest.snapshot_path).as_posix()
                yield name_of(repository.repo_id, held, file) or str(path), path


def cache_folder() -> Path:
    """Return the folder of the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _is_model(folder: Path) -> bool:
    if not (folder / CONFIG).exists():
        return False
    if any(folder.glob(_SAFETENSORS)):
        return True
    try:
        return (folder / _OF_TORCH).exists() and head_at(folder) is not None
    except CheckpointError:
        return False


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
