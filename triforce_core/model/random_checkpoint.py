"""Checkpoints of random weights in any shape, to be timed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from triforce_core.model.config import ModelConfig
from triforce_core.model.share import Share
from triforce_core.model.tensors import layer_shapes


class RandomCheckpoint:
    """Reads as a Checkpoint of random weights."""

    stored_dtype = "float16"
    files: tuple[Path, ...] = ()

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._noise: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def pieces(self, name: str) -> list[tuple[int, None]]:
        shapes = layer_shapes(self.config)
        return [(shapes[name.split(".")[-1]][0] if "." in name else self.config.vocab, None)]

    def read_layer(self, layer: int, views: Mapping[str, torch.Tensor]) -> None:
        for part, view in views.items():
            self.read(part, view)

    def read(self, name: str, into: torch.Tensor) -> None:
        if "norm" in name:
            into.fill_(1)
            return
        key = (into.device, into.dtype)
        if key not in self._noise:
            noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0))
            self._noise[key] = (noise * _STD).to(*key)
        for part in into.view(-1).split(_NOISE):
            part.copy_(self._noise[key][: part.numel()])

    def rope_factors(self) -> None:
        return None

    def shared(self, share: Share) -> RandomCheckpoint:
        return RandomCheckpoint(share.config)

    def reopened(self) -> RandomCheckpoint:
        return RandomCheckpoint(self.config)

    def close(self) -> None:
        self._noise.clear()


# So many random numbers are drawn and repeated. A prime: no two rows of a matrix are the same.
_NOISE = 1_000_003
_STD = 0.02
