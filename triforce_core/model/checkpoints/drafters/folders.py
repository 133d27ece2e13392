"""Drafters in files of their own that draft from a model's hidden states: what a folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triforce_core.model.checkpoints.checkpoint import Checkpoint
from triforce_core.model.checkpoints.drafters.dflash import dflash_config, is_dflash, open_dflash
from triforce_core.model.checkpoints.drafters.eagle3 import (
    is_eagle3,
    open_eagle3,
    planned_eagle3,
)
from triforce_core.model.config import ModelConfig
from triforce_core.model.families.hf import SOURCE
from triforce_offload.checkpoint.header import read_json


def head_at(path: Path) -> dict[str, Any] | None:
    """Return the parsed config.json of the directory of a head; None if it is none.

    Raises CheckpointError.
    """
    file = path / SOURCE
    raw = read_json(file) if file.exists() else {}
    return raw if is_dflash(raw) or is_eagle3(raw) else None


def open_head(path: Path, raw: Mapping[str, Any], target: ModelConfig) -> Checkpoint:
    """Open the directory of a head.

    raw: see `head_at`
    target: config of the model that it drafts for

    Raises CheckpointError or UnsupportedModelError.
    """
    return (open_dflash if is_dflash(raw) else open_eagle3)(path, target)


def planned_head(path: Path, raw: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """Return the config of a head in a directory of which at least the config.json is there.

    Raises as `open_head`.
    """
    return dflash_config(raw, target) if is_dflash(raw) else planned_eagle3(path, raw, target)
