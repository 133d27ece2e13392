"""What clients learn about the files of a model."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from triforce_core.model.checkpoints.checkpoint import Checkpoint
from triforce_core.model.config import ModelConfig
from triforce_core.saved import digest

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class ModelFiles:
    """What clients learn about the files of a model.

    nbytes: their size
    digest: a SHA-256 that identifies them
    parameters: number of the model's parameters, without those that only draft
    quantisation: format of most of the matrices, such as Q4_K_M or BF16
    format: "gguf" or "safetensors"
    """

    nbytes: int
    digest: str
    parameters: int
    quantisation: str
    family: str
    format: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelFiles:
        """Return what a model's headers say."""
        config = checkpoint.config
        return cls(
            nbytes=sum(file.stat().st_size for file in checkpoint.files),
            digest=digest(checkpoint.fingerprint),
            parameters=_parameters(config),
            quantisation=_quantisation(checkpoint),
            family=config.family,
            format="gguf" if checkpoint.metadata else "safetensors",
        )

    def details(self) -> dict[str, Any]:
        """Return the details of a model in Ollama's form."""
        size = f"{self.parameters / 1e9:.1f}B"
        if self.parameters < 1e9:
            size = f"{self.parameters / 1e6:.2f}M"
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family],
            "parameter_size": size,
            "quantization_level": self.quantisation,
        }


def _parameters(config: ModelConfig) -> int:
    outside = config.vocab * config.hidden * (1 if config.tied else 2)
    if table := config.ngrams:
        outside += sum(table.sizes) * table.width
    outside += config.vocab * config.per_layer_columns
    parts = [config.last_shapes, *(spec.shapes(config.hidden) for spec in config.layers)]
    return outside + sum(math.prod(shape) for part in parts for shape in part.values())


def _quantisation(checkpoint: Checkpoint) -> str:
    """Return the mix that a GGUF file names, else what most rows of the first layer are in."""
    if mix := _mix(checkpoint.metadata):
        return mix
    if stored := checkpoint.stored_dtype:
        return _DTYPES.get(stored, stored)
    rows: Counter[str] = Counter()
    for part, shape in checkpoint.config.layers[0].shapes(checkpoint.config.hidden).items():
        for count, kind in checkpoint.pieces(f"layers.0.{part}") if len(shape) == 2 else ():
            rows[kind.name if kind else ""] += count
    return rows.most_common(1)[0][0] if rows else ""


def _mix(metadata: Any) -> str | None:
    kind = (metadata or {}).get("general.file_type")
    if not isinstance(kind, int):
        return None
    # Imported here, because only GGUF files need the package.
    from gguf import LlamaFileType

    try:
        return LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return None
