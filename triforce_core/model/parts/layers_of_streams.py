"""Layers with residual streams."""

from __future__ import annotations

import torch

from triforce_core.model.config import ModelConfig
from triforce_core.model.elsewhere import Sums
from triforce_core.model.mixers import MixerLayer
from triforce_core.model.mlps import mlp_alone
from triforce_core.model.norms import Norm
from triforce_core.model.parts.ngrams import NGramLayer
from triforce_core.model.parts.streams import Around
from triforce_kernels.streams.streams import add_to_streams
from triforce_kernels.weights.linear import linear
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.weights.layouts import Views


class LayersOfStreams:
    """All layers of a model with residual streams."""

    def __init__(self, config: ModelConfig, norm: Norm, sums: Sums) -> None:
        count = config.streams.count
        self._mixer, self._mlp = (Around(part, norm, count) for part in ("mixer", "mlp"))
        self._mlps = [mlp_alone(spec, norm, sums) for spec in config.layers]
        self._sums = sums
        self._ngrams = None
        if config.ngrams:
            self._ngrams = NGramLayer(config.ngrams, norm, len(config.recurrent_layers))

    def add_ngrams(
        self,
        w: Views,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        cache: Cache,
        batch: ForwardBatch,
    ) -> None:
        """Add n-gram embeddings before their layer. See `NGramLayer.add`."""
        self._ngrams.add(w, hidden, embedded, cache, batch)

    def run(
        self,
        index: int,
        w: Views,
        hidden: torch.Tensor,
        mixer: MixerLayer,
        cache: Cache,
        batch: ForwardBatch,
    ) -> None:
        """Add the mixer and the MLP of a layer to `hidden` [rows, streams * width], in place."""
        taken, sums = self._mixer.before(w, hidden)
        mixed = mixer(w, linear(taken, w["qkv"], w.get("qkv_bias")), cache, batch)
        output = self._sums.sum(linear(mixed, w["o"], w.get("o_bias")))
        add_to_streams(hidden, sums, output)
        taken, sums = self._mlp.before(w, hidden)
        add_to_streams(hidden, sums, self._mlps[index](w, taken, taken))
