"""Models in folders where people and programs keep them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from triforce_offload.checkpoint.header import read_json
from triforce_offload.errors import CheckpointError

# Name of the file that describes a model in a folder.
CONFIG = "config.json"

# Projectors of images, adapters and a quantiser's statistics lie beside models and are none.
NO_MODEL = re.compile(r"mmproj|[-_.]lora(?![a-z])|^imatrix|[-_.]imatrix\.gguf", re.IGNORECASE)


class Place(NamedTuple):
    """A folder of models. depth: how many folders deep they lie"""

    what: str
    folder: Path
    depth: int


def places() -> list[Place]:
    """Return the folders that are looked through."""
    home = Path.home()
    llama_cpp = os.environ.get("LLAMA_CACHE")
    return [
        Place("LM Studio", home / ".lmstudio/models", 3),
        Place("LM Studio", home / ".cache/lm-studio/models", 3),
        Place("llama.cpp", Path(llama_cpp) if llama_cpp else home / ".cache/llama.cpp", 1),
        Place("~/models", home / "models", 3),
        Place("here", Path(), 2),
    ]


def config_of(folder: Path) -> dict[str, Any]:
    """Return what the config.json of a model's folder holds.

    Raises CheckpointError, which names the folder's .gguf file if that is what it has.
    """
    if (folder / CONFIG).exists():
        return read_json(folder / CONFIG)
    files = [path for path in models_in(folder, 0) if path != folder]
    what = f"{files[0]} is a model" if len(files) == 1 else "a .gguf file is given by its path"
    raise CheckpointError(f"{folder} holds no model: it has no config.json ({what})")


def models_in(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the .gguf files and the directories with safetensors in a folder.

    Of a file in several parts, only the first is one. Hidden folders are left out.
    """
    # Imported here, because only folders need the package of GGUF files.
    from triforce_offload.checkpoint.gguf import PART

    if depth < 0:
        return
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return
    names = {path.name for path in inside}
    if CONFIG in names and any(name.endswith(".safetensors") for name in names):
        yield folder
    for path in inside:
        if path.name.startswith("."):
            continue
        if path.suffix == ".gguf" and path.is_file():
            part = PART.search(path.name)
            if not NO_MODEL.search(path.name) and (part is None or int(part[1]) == 1):
                yield path
        elif path.is_dir() and not path.is_symlink():
            yield from models_in(path, depth - 1)
