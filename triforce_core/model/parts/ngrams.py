"""Computation of n-gram embeddings, and the table that they are looked up in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from triforce_core.model.norms import Norm
from triforce_core.model.parts.specs import NGrams
from triforce_core.model.parts.streams import normed_streams
from triforce_kernels.elementwise import sigmoid
from triforce_kernels.recurrent.conv import Convolution
from triforce_kernels.weights.linear import linear
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.link.waiting import come
from triforce_offload.weights.layouts import Views

# Least size of a gate, whose root is taken.
_LEAST = 1e-6


class Rows(Protocol):
    """Rows of a table."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def lookup(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows as numbers, [rows, columns]. rows: [rows] int64 on the host"""


class NGramTable:
    """The rows of all heads, of which only those that tokens need are read."""

    def __init__(self, spec: NGrams, parts: Sequence[Rows], scale: float = 1.0) -> None:
        """parts: of the table, one above the other, [rows, width] each; all but the last have
            equally many rows
        scale: factor of all numbers
        """
        self._spec = spec
        self._parts = list(parts)
        self._scale = scale
        self._multipliers = torch.tensor(spec.multipliers)
        self._sizes = torch.tensor(spec.sizes)
        self._firsts = self._sizes.cumsum(0) - self._sizes

    def rows_of(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the row of each head for each token of a batch, [tokens, heads] int64 on the host.
        Raises LinkError.
        """
        tokens = come(batch.tokens).cpu()
        parts = tokens.split([each.rows for each in batch.alone])
        alone = zip(parts, batch.alone, strict=True)
        return torch.cat([self._hashed(own, each) for own, each in alone])

    def looked_up(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of all heads, [tokens, columns] on the host."""
        height, flat = self._parts[0].shape[0], rows.flatten()
        found = torch.empty(len(flat), self._spec.width, dtype=dtype)
        which = flat // height
        for index in which.unique().tolist():
            own = (which == index).nonzero().squeeze(1)
            part = self._parts[index].lookup(flat[own] - index * height, torch.float32)
            found[own] = (part * self._scale).to(dtype)
        return found.view(len(rows), -1)

    def _hashed(self, tokens: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`rows_of` for one sequence."""
        spec, longest = self._spec, len(self._spec.multipliers)
        known = [token for before in batch.before for token in before][-spec.before :]
        known = [spec.end] * (spec.before - len(known)) + known
        lines = batch.lineage(longest).cpu() + spec.before
        seen = torch.cat((torch.tensor(known), tokens))[lines].flip(1)
        # A token that ends a text hides those before it: these count as such tokens too.
        hidden = (seen[:, 1:] == spec.end).cumsum(1) > 0
        seen[:, 1:].masked_fill_(hidden, spec.end)
        mixed, each = seen[:, 0] * self._multipliers[0], len(spec.sizes) // spec.before
        found = []
        for index in range(1, longest):
            mixed = mixed ^ (seen[:, index] * self._multipliers[index])
            heads = slice((index - 1) * each, index * each)
            found.append(mixed.unsqueeze(1).remainder(self._sizes[heads]) + self._firsts[heads])
        return torch.cat(found, 1)


class NGramLayer:
    """What n-gram embeddings add to the residual streams before a layer."""

    def __init__(self, spec: NGrams, norm: Norm, place: int) -> None:
        """place: number of its convolution in caches"""
        self._spec = spec
        self._norm = norm
        self._place = place

    def add(
        self,
        w: Views,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        cache: Cache,
        batch: ForwardBatch,
    ) -> None:
        """Add to `hidden` [rows, streams * width], in place. embedded: [rows, columns]"""
        norm, count = self._norm, self._spec.streams
        keys = normed_streams(norm, linear(embedded, w["ngram_keys"]), w["ngram_key_norm"], count)
        queries = normed_streams(norm, hidden, w["ngram_query_norm"], count)
        products = (keys * queries).view(batch.rows * count, -1).float()
        width = products.shape[1]
        gate = linear(products, products.new_ones(1, width)).div_(math.sqrt(width))
        gate = gate.abs().clamp_min_(_LEAST).sqrt_() * gate.sign()
        values = linear(embedded, w["ngram_values"]).unsqueeze(1)
        gates = sigmoid(gate.to(hidden.dtype)).view(batch.rows, count, 1)
        gated = (gates * values).flatten(1)
        inputs = normed_streams(norm, gated, w["ngram_conv_norm"], count)
        convolution = Convolution(self._spread(w["ngram_conv"]), activates=True)
        hidden += gated
        hidden += cache.convolve(self._place, inputs, convolution, batch)

    def _spread(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight of the convolution over every token, [channels, 1, seen]."""
        spread = weight.new_zeros(weight.shape[0], 1, self._spec.seen)
        spread[..., :: len(self._spec.multipliers)] = weight
        return spread
