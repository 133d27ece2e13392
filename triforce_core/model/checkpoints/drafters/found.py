"""Drafters in files of their own that draft from a model's hidden states: what a path holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from triforce_core.model.checkpoints.checkpoint import Checkpoint, is_gguf
from triforce_core.model.checkpoints.drafters import assistant, dflash_files
from triforce_core.model.checkpoints.drafters.assistant import (
    assistant_config,
    is_assistant,
    open_assistant,
    typical_assistant,
)
from triforce_core.model.checkpoints.drafters.dflash import (
    dflash_config,
    is_dflash,
    typical_dflash,
)
from triforce_core.model.checkpoints.drafters.dflash_files import open_dflash
from triforce_core.model.checkpoints.drafters.eagle3 import (
    is_eagle3,
    open_eagle3,
    planned_eagle3,
    typical_eagle3,
)
from triforce_core.model.checkpoints.drafters.files import shapes_of, typical_pieces
from triforce_core.model.config import ModelConfig
from triforce_core.model.families.hf import SOURCE
from triforce_core.model.sharing.share import Pieces
from triforce_core.settings import ASSISTANT, DFLASH, EAGLE3
from triforce_offload.checkpoint.header import read_json
from triforce_offload.errors import CheckpointError


class _Kind(NamedTuple):
    """A kind of drafter.

    known: returns whether a config.json is that of one
    config: returns the config of one of which only the config.json is there
    open: opens its files
    """

    known: Callable[[Mapping[str, Any]], bool]
    config: Callable[[Mapping[str, Any], ModelConfig], ModelConfig]
    open: Callable[[Path, Mapping[str, Any], ModelConfig], Checkpoint]


_KINDS = (
    _Kind(is_dflash, dflash_config, open_dflash),
    _Kind(is_assistant, assistant_config, open_assistant),
    _Kind(is_eagle3, planned_eagle3, lambda path, _, target: open_eagle3(path, target)),
)
# The fields of a config.json that a GGUF file's metadata have, by its architecture.
_OF_GGUF = {each.ARCHITECTURE: each.fields_of_gguf for each in (dflash_files, assistant)}


def _kind(raw: Mapping[str, Any]) -> _Kind | None:
    return next((kind for kind in _KINDS if kind.known(raw)), None)


def head_at(path: Path) -> dict[str, Any] | None:
    """Return the parsed config.json of the directory of a head, or the equivalent fields of a GGUF
    file. Return None for other models.

    Raises CheckpointError or UnsupportedModelError.
    """
    if path.is_dir():
        file = path / SOURCE
        raw = read_json(file) if file.exists() else {}
        return raw if _kind(raw) else None
    if not is_gguf(path):
        return None
    from triforce_offload.checkpoint.gguf import GGUFSource

    with closing(GGUFSource(path)) as source:
        fields = _OF_GGUF.get(source.metadata.get("general.architecture"))
        if fields is None:
            return None
        try:
            return fields(source.metadata)
        except CheckpointError as error:
            raise type(error)(f"{path}: {error}") from error


def open_head(path: Path, raw: Mapping[str, Any], target: ModelConfig) -> Checkpoint:
    """Open the files of a head.

    raw: see `head_at`
    target: config of the model that it drafts for

    Raises CheckpointError or UnsupportedModelError.
    """
    return _kind(raw).open(path, raw, target)


class PlannedHead(NamedTuple):
    """What a plan needs to know of a head.

    pieces: pieces of its matrices; None without its weights
    """

    config: ModelConfig
    pieces: Pieces | None = None


_TYPICAL = {EAGLE3: typical_eagle3, DFLASH: typical_dflash, ASSISTANT: typical_assistant}


def typical_head(draft: str, target: ModelConfig) -> PlannedHead:
    """Return a head of the usual shape. draft: see `settings.of_usual_shape`

    Raises UsageError, or UnsupportedModelError for a model for which there is none.
    """
    kind, colon, mix = draft.partition(":")
    config = _TYPICAL[kind](target)
    return PlannedHead(config, typical_pieces(config, mix) if colon else None)


def planned_head(path: Path, raw: Mapping[str, Any], target: ModelConfig) -> PlannedHead:
    """Return a head of which at least the config.json is there.

    Raises as `open_head`.
    """
    if path.is_dir() and not any(path.glob("*.safetensors")):
        return PlannedHead(_kind(raw).config(raw, target))
    with closing(open_head(path, raw, target)) as head:
        # Read now, because the files are closed when they are used.
        shapes = shapes_of(head.config)
        pieces = {name: head.pieces(name) for name, shape in shapes.items() if len(shape) == 2}
        return PlannedHead(head.config, pieces.__getitem__)
