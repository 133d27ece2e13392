"""Models that Ollama has downloaded, by their manifests. Their files are GGUF without a suffix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from triforce_offload.checkpoint.header import read_json
from triforce_offload.errors import TriforceError

_MODEL = "application/vnd.ollama.image.model"
# What the names of Ollama leave out.
_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"


def folders() -> list[Path]:
    """Return the folders in which Ollama keeps models, of a user and of a service."""
    if given := os.environ.get("OLLAMA_MODELS"):
        return [Path(given)]
    return [Path.home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]


def models() -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of each model, such as `qwen3:8b`."""
    for folder in folders():
        for manifest in sorted(_manifests(folder)):
            if path := _file(folder, manifest):
                yield _name(manifest.relative_to(folder / "manifests")), path


def file_of(name: str) -> Path | None:
    """Return the file of a model by Ollama's name for it, None if there is none."""
    wanted = name if ":" in name else f"{name}:{_TAG}"
    return next((path for found, path in models() if found == wanted), None)


def _manifests(folder: Path) -> list[Path]:
    try:
        return [path for path in (folder / "manifests").glob("*/*/*/*") if path.is_file()]
    except OSError:
        return []


def _name(place: Path) -> str:
    registry, namespace, model, tag = place.parts
    if registry != _REGISTRY:
        return f"{registry}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == _NAMESPACE else f"{namespace}/{model}:{tag}"


def _file(folder: Path, manifest: Path) -> Path | None:
    """Return the file of a manifest's weights if it is there."""
    try:
        layers = read_json(manifest)["layers"]
        digests = [each["digest"] for each in layers if each["mediaType"] == _MODEL]
    except (TriforceError, KeyError, TypeError):
        return None
    # Several files are the parts of one model, which no name stands for here.
    if len(digests) != 1 or not isinstance(digests[0], str):
        return None
    path = folder / "blobs" / digests[0].replace(":", "-")
    return path if path.is_file() else None
