"""From a model's name to its file or directory."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from triforce_core.model.found import hub, ollama
from triforce_core.model.found.hub import Announce, Download
from triforce_core.model.known.hub_ids import gguf_id_of, hub_id_of, short_names
from triforce_offload.errors import CheckpointError, UsageError

# A hub id, and behind a colon a quantisation or a file.
_HUB_ID = re.compile(r"(?![.~])[\w.-]+/[\w.-]+(?<!\.gguf)(:[^:]+)?")
_SITE = re.compile(r"^(https://)?(hf\.co|huggingface\.co)/")
# The page of a file, or the address of its download.
_PAGE = re.compile(r"([\w.-]+/[\w.-]+)/(?:blob|resolve)/[\w.-]+/([\w./-]+\.gguf)(?:\?.*)?")


def silently(download: Download) -> None:
    """Announce nothing."""


def resolve(model: str | Path, announce: Announce = silently) -> Path:
    """Return the directory or GGUF file of a model. A model of the hub is downloaded.

    model: a path; a hub id (owner/name), also with a quantisation of its GGUF files behind a colon;
        the name of a known shape, which stands for a hub id; or Ollama's name for a model that it
        has downloaded
    announce: called before weights are downloaded, with their size

    Raises UsageError if `model` is none of these, or as `downloaded` does.
    """
    if (path := local(model)) is not None:
        return path
    name = str(model)
    gguf_id = gguf_id_of(name)
    hub_id = hub_id_of(name.lower()) or gguf_id or without_site(name)
    if not _HUB_ID.fullmatch(hub_id):
        near = get_close_matches(name.lower(), short_names(), n=1)
        raise UsageError(
            f"there is no file or directory {name}, and it is no hub id (owner/name), no short "
            f"name and no model of Ollama's; {f'did you mean {near[0]}? ' if near else ''}"
            "triforce list shows the models on this machine"
        )
    try:
        return hub.downloaded(hub_id, announce)
    except CheckpointError as error:
        if gguf_id is None:
            raise
        raise CheckpointError(f"{error}; {name} stands for {gguf_id}") from error


def without_site(name: str) -> str:
    """Return the hub id, with what follows it, of a name that may be the address of a page of the
    hub, or that asks for the latest version as Ollama's names do.
    """
    if (stripped := _SITE.sub("", name)) == name:
        return name
    stripped = stripped.removesuffix("/").removesuffix(":latest").removesuffix("/tree/main")
    page = _PAGE.fullmatch(stripped)
    return f"{page[1]}:{page[2]}" if page else stripped


def local(model: str | Path) -> Path | None:
    """Return the directory or file of a model that is on this machine under a name of its own: a
    path, or Ollama's name. None for all others.

    Raises UsageError for what is no name.
    """
    if not isinstance(model, (str, Path)):
        raise UsageError(f"a model is a path or a hub id, and this is {type(model).__name__}")
    name = str(model)
    if not name:
        raise UsageError("the model's name is empty")
    path = Path(model).expanduser()
    if path.exists():
        return path
    return None if name.startswith((".", "/", "~")) else ollama.file_of(name)
