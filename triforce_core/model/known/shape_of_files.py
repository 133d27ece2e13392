"""Properties of models that plans depend on, read from files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triforce_core.model.checkpoints.checkpoint import Checkpoint, is_gguf, open_checkpoint
from triforce_core.model.checkpoints.mtp import MtpHead
from triforce_core.model.config import ModelConfig
from triforce_core.model.families.hf import from_file, from_hf, quantised
from triforce_core.model.found.folders import CONFIG, config_of
from triforce_core.model.known.mixes import mix_of, pieces_of
from triforce_core.model.tensors import Pieces
from triforce_offload.checkpoint.header import read_json


@dataclass(frozen=True)
class Shape:
    """The properties of a model that a plan depends on.

    pieces: pieces of its matrices if it is quantised, else None
    dtype: number type in which it is published, None if it is quantised or not known
    published: number of positions that its published files declare, if its authors describe how to
        have more of them: by a rope scaling in config.json
    has_head: whether its files have the MTP head that its family publishes, if any
    head_pieces: pieces of the matrices of that head if the model is quantised and its files are on
        this machine, else None
    """

    config: ModelConfig
    pieces: Pieces | None = None
    dtype: str | None = None
    published: int | None = None
    has_head: bool = True
    head_pieces: Pieces | None = None


def of_path(path: Path) -> Shape:
    """Return the shape of a model's directory, GGUF file or config.json.

    Raises CheckpointError or UnsupportedModelError.
    """
    if path.is_dir():
        return _of_folder(path)
    if not is_gguf(path):
        return of_config(read_json(path), path)
    with closing(open_checkpoint(path)) as checkpoint:
        shape = Shape(checkpoint.config, dtype=checkpoint.stored_dtype)
        return _of_files(shape, checkpoint, quantised=shape.dtype is None)


def of_config(raw: Mapping[str, Any], path: Path | None = None) -> Shape:
    """Return the shape that a config.json describes. Raises as `from_hf` does.

    path: the file, if there is one; errors name it
    """
    stored = raw.get("dtype", raw.get("torch_dtype"))
    config = from_file(path, raw, {}) if path else from_hf(raw, {})
    mix = mix_of(quantised(raw))
    pieces = pieces_of(config, mix) if mix else None
    return Shape(config, pieces, stored if isinstance(stored, str) else None)


def _of_folder(path: Path) -> Shape:
    """Return the shape of a folder with a config.json, and of the weights beside it."""
    shape = of_config(config_of(path), path / CONFIG)
    if not any(path.glob("*.safetensors")):
        return shape
    with warnings.catch_warnings():
        # Plans do not load the part that reads images either.
        warnings.simplefilter("ignore", RuntimeWarning)
        with closing(open_checkpoint(path)) as checkpoint:
            return _of_files(shape, checkpoint, quantised=shape.pieces is not None)


def _of_files(shape: Shape, checkpoint: Checkpoint, *, quantised: bool) -> Shape:
    """Return the shape with the pieces and the MTP head that the files have."""
    head = checkpoint.mtp_head
    shape = replace(shape, has_head=head is not None)
    if not quantised:
        return shape
    pieces = _pieces_read(checkpoint, "head", "embedding")
    return replace(shape, pieces=pieces, head_pieces=head and _pieces_read(head))


def _pieces_read(found: Checkpoint | MtpHead, *ends: str) -> Pieces:
    """Read all pieces now, because the file is closed when they are used."""
    config = found.config
    shapes = dict(config.last_shapes)
    for layer, spec in enumerate(config.layers):
        parts = spec.shapes(config.hidden)
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in parts.items()}
    names = (*ends, *(name for name, shape in shapes.items() if len(shape) == 2))
    return {name: found.pieces(name) for name in names}.__getitem__
