"""Checkpoints of random weights in any shape, for timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import NormKind
from triforce_core.model.parts.ngrams import NGramTable
from triforce_core.model.parts.per_layer_inputs import PerLayerTable
from triforce_core.model.sharing.share import Share
from triforce_kernels.weights.stored import SplitWeight, is_split
from triforce_offload.checkpoint.reading import read_into
from triforce_offload.checkpoint.source import WHOLE, Corner


class RandomCheckpoint:
    """A Checkpoint with random weights."""

    stored_dtype = "float16"
    files: tuple[Path, ...] = ()

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._noise: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        # Coding a matrix takes much longer than copying one, so all matrices of a shape are equal.
        self._coded: dict[tuple[type, tuple[int, ...]], SplitWeight] = {}

    def pieces(self, name: str) -> list[tuple[int, None]]:
        if "." not in name:
            return [(self.config.last_shapes.get(name, (self.config.vocab,))[0], None)]
        _, layer, part = name.split(".")
        return [(self.config.layers[int(layer)].shapes(self.config.hidden)[part][0], None)]

    def read_layer(self, layer: int, views: Mapping[str, torch.Tensor | SplitWeight]) -> None:
        for part, view in views.items():
            self.read(part, view)

    def read(self, name: str, into: torch.Tensor | SplitWeight) -> None:
        """Fill `into` with random numbers in its format, or for a norm, a scale or a decay with
        what leaves numbers of their size as they are.
        """
        if is_split(into):
            self._read_coded(name, into)
        elif "norm" in name:
            into.fill_(float(self.config.norm_kind is not NormKind.RMS_PLUS_ONE))
        elif name.endswith("_scale"):
            into.fill_(1)
        elif name.rpartition(".")[2] == "decay":
            # Recurrent states remember some tens of tokens; above 0 they would grow without end.
            into.fill_(_DECAY)
        else:
            self._fill(into)

    def _read_coded(self, name: str, into: SplitWeight) -> None:
        key = (type(into), tuple(into.shape))
        if key not in self._coded:
            here = _on_host(into)
            read_into(_Noise(self), name, here, WHOLE)
            self._coded[key] = here
        for field, source in _tensors(self._coded[key]).items():
            getattr(into, field).copy_(source)

    def _fill(self, into: torch.Tensor, start: int = 0) -> None:
        """start: index of this part's first number in the whole tensor"""
        key = (into.device, into.dtype)
        if key not in self._noise:
            noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0))
            self._noise[key] = (noise * _STD).to(*key)
        noise, place = self._noise[key], start % _NOISE
        flat = into.view(-1)
        first, rest = flat[: _NOISE - place], flat[_NOISE - place :]
        first.copy_(noise[place : place + first.numel()])
        for part in rest.split(_NOISE):
            part.copy_(noise[: part.numel()])

    def rope_factors(self) -> None:
        return None

    def ngram_table(self) -> NGramTable | None:
        spec = self.config.ngrams
        return spec and NGramTable(spec, [_RandomRows(self, (sum(spec.sizes), spec.width))])

    def per_layer_table(self) -> PerLayerTable | None:
        config = self.config
        if config.per_layer_inputs is None:
            return None
        rows = _RandomRows(self, (config.vocab, config.per_layer_columns))
        return PerLayerTable(config.per_layer_inputs.width, rows)

    def shared(self, share: Share) -> RandomCheckpoint:
        return RandomCheckpoint(share.config)

    def reopened(self) -> RandomCheckpoint:
        return RandomCheckpoint(self.config)

    def close(self) -> None:
        self._noise.clear()
        self._coded.clear()


class _RandomRows(NamedTuple):
    """Rows of a table, each of which is the same whenever it is looked up."""

    checkpoint: RandomCheckpoint
    shape: tuple[int, int]

    def lookup(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        found = torch.empty(len(rows), self.shape[1], dtype=dtype)
        for row, into in zip(rows.tolist(), found, strict=True):
            self.checkpoint._fill(into, row * self.shape[1])
        return found


class _Noise:
    """The part of TensorSource that `read_split` needs."""

    def __init__(self, checkpoint: RandomCheckpoint) -> None:
        self._checkpoint = checkpoint

    def read(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        self._checkpoint._fill(into, corner.row * into.shape[-1])


def _tensors(weight: SplitWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight by field name."""
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _on_host(weight: SplitWeight) -> SplitWeight:
    """Return an uninitialised weight of the same shape and type in host memory."""
    parts = {name: torch.empty_like(it, device="cpu") for name, it in _tensors(weight).items()}
    return replace(weight, **parts)


# Random numbers that are drawn and repeated. A prime, so that no two rows of a matrix are equal.
_NOISE = 1_000_003
_STD = 0.02
_DECAY = -0.05
