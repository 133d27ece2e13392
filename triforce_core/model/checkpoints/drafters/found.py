"""Drafters in files of their own that draft from a model's hidden states: what a path holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from triforce_core.model.checkpoints.checkpoint import Checkpoint, is_gguf
from triforce_core.model.checkpoints.drafters.dflash import dflash_config, is_dflash
from triforce_core.model.checkpoints.drafters.dflash_files import (
    ARCHITECTURE,
    fields_of_gguf,
    open_dflash,
)
from triforce_core.model.checkpoints.drafters.eagle3 import (
    is_eagle3,
    open_eagle3,
    planned_eagle3,
)
from triforce_core.model.config import ModelConfig
from triforce_core.model.families.hf import SOURCE
from triforce_core.model.sharing.share import Pieces
from triforce_offload.checkpoint.header import read_json
from triforce_offload.errors import CheckpointError


def head_at(path: Path) -> dict[str, Any] | None:
    """Return the parsed config.json of the directory of a head, or the equivalent fields of a GGUF
    file. Return None for other models.

    Raises CheckpointError or UnsupportedModelError.
    """
    if path.is_dir():
        file = path / SOURCE
        raw = read_json(file) if file.exists() else {}
        return raw if is_dflash(raw) or is_eagle3(raw) else None
    if not is_gguf(path):
        return None
    from triforce_offload.checkpoint.gguf import GGUFSource

    with closing(GGUFSource(path)) as source:
        if source.metadata.get("general.architecture") != ARCHITECTURE:
            return None
        try:
            return fields_of_gguf(source.metadata)
        except CheckpointError as error:
            raise type(error)(f"{path}: {error}") from error


def open_head(path: Path, raw: Mapping[str, Any], target: ModelConfig) -> Checkpoint:
    """Open the files of a head.

    raw: see `head_at`
    target: config of the model that it drafts for

    Raises CheckpointError or UnsupportedModelError.
    """
    return open_dflash(path, raw, target) if is_dflash(raw) else open_eagle3(path, target)


class PlannedHead(NamedTuple):
    """What a plan needs to know of a head.

    pieces: pieces of its matrices; None without its weights
    """

    config: ModelConfig
    pieces: Pieces | None = None


def planned_head(path: Path, raw: Mapping[str, Any], target: ModelConfig) -> PlannedHead:
    """Return a head of which at least the config.json is there.

    Raises as `open_head`.
    """
    if path.is_dir() and not any(path.glob("*.safetensors")):
        of_dflash = is_dflash(raw)
        return PlannedHead((dflash_config if of_dflash else planned_eagle3)(raw, target))
    with closing(open_head(path, raw, target)) as head:
        config, joins = head.config, head.config.joins
        shapes = joins.ends(config.hidden, config.vocab)
        for index, spec in enumerate(config.layers):
            parts = spec.shapes(config.hidden)
            shapes |= {f"layers.{index}.{part}": shape for part, shape in parts.items()}
        # Read now, because the files are closed when they are used.
        pieces = {name: head.pieces(name) for name, shape in shapes.items() if len(shape) == 2}
        return PlannedHead(config, pieces.__getitem__)
