"""Computation of per-layer embeddings, and the table that they are looked up in."""

from __future__ import annotations

import torch

from triforce_core.model.norms import Norm
from triforce_core.model.parts.ngrams import Rows
from triforce_kernels.layer import geglu
from triforce_kernels.limits import LOOKED_UP_AT_ONCE
from triforce_kernels.weights.linear import linear
from triforce_offload.link.waiting import come
from triforce_offload.weights.layouts import Views


class PerLayerRows:
    """Numbers of tokens for all layers, one layer after another."""

    def __init__(self, rows: torch.Tensor, width: int, places: torch.Tensor | None = None) -> None:
        """rows: of different tokens, [count, columns]
        width: numbers of a layer
        places: row of each token, [tokens] int64; None if each has its own
        """
        self._rows = rows
        self._width = width
        self._places = places

    def of(self, layer: int, first: int, end: int) -> torch.Tensor:
        """Return those of a layer, [tokens, width], of tokens `first` to `end`."""
        columns = slice(layer * self._width, (layer + 1) * self._width)
        if self._places is None:
            return self._rows[first:end, columns]
        return self._rows[self._places[first:end], columns]

    def all(self) -> torch.Tensor:
        """Return those of all layers, [tokens, columns]."""
        return self._rows if self._places is None else self._rows[self._places]


class PerLayerTable:
    """A row for each token, with the numbers of one layer after another. It stays in its file."""

    def __init__(self, width: int, rows: Rows) -> None:
        """width: numbers of a layer"""
        self._width = width
        self._rows = rows

    def looked_up(self, tokens: torch.Tensor, dtype: torch.dtype) -> PerLayerRows:
        """Return the rows of tokens, on the host. Raises LinkError or CheckpointError."""
        wanted, places = come(tokens).cpu().unique(return_inverse=True)
        # As transformers' embeddings of Gemma, the factor is rounded to their dtype.
        scale = torch.tensor(self._width**0.5, dtype=dtype)
        found = torch.empty(len(wanted), self._rows.shape[1], dtype=dtype)
        parts = (each.split(LOOKED_UP_AT_ONCE) for each in (wanted, found))
        for rows, into in zip(*parts, strict=True):
            torch.mul(self._rows.lookup(rows, dtype), scale, out=into)
        return PerLayerRows(found, self._width, places)


def add_per_layer_inputs(
    w: Views, norm: Norm, hidden: torch.Tensor, embedded: torch.Tensor, rows: torch.Tensor
) -> None:
    """Add per-layer embeddings to the hidden states after the MLP, [rows, hidden], in place
    (transformers, `Gemma4TextModel.project_per_layer_inputs`).

    embedded: embeddings of the tokens, [rows, hidden]
    rows: those of the layer's table, [rows, width]
    """
    mixed = linear(embedded, w["per_layer_mix"]) * embedded.shape[1] ** -0.5
    inputs = (norm(mixed, w["per_layer_mix_norm"]) + rows) * 2.0**-0.5
    gated = geglu(torch.cat((linear(hidden, w["per_layer_gate"]), inputs), 1))
    hidden += norm(linear(gated, w["per_layer_up"]), w["per_layer_norm"])
