"""The model: a loop over layers that does not know where weights and KV are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from triforce_core.model.config import ModelConfig, RotationKind
from triforce_core.model.elsewhere import CacheElsewhere, Place, Sums, batch_on, hidden_for, moved
from triforce_core.model.fused import FusedLayer
from triforce_core.model.heads.joins import Tapped
from triforce_core.model.heads.taps import Taps
from triforce_core.model.layers import LayerSpec
from triforce_core.model.mixers import mixer_layer
from triforce_core.model.mlps import mlp_layer
from triforce_core.model.norms import Norm
from triforce_core.model.parts.layers_of_streams import LayersOfStreams
from triforce_core.model.parts.ngrams import NGramTable
from triforce_core.model.parts.per_layer_inputs import (
    PerLayerRows,
    PerLayerTable,
    add_per_layer_inputs,
)
from triforce_core.model.parts.streams import gated_mean, normed_streams
from triforce_core.model.rope import Rope
from triforce_kernels.dispatch import HOST, TRITON, backend
from triforce_kernels.elementwise import tanh
from triforce_kernels.limits import FEW_ROWS
from triforce_kernels.same_bits import same_bits
from triforce_kernels.weights.linear import Weight, linear, lookup
from triforce_offload.forward_batch import Cache, Carried, ForwardBatch
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import put
from triforce_offload.ranks import Alone, Ranks
from triforce_offload.weights.layouts import Views
from triforce_offload.weights.store import Weights


@dataclass(frozen=True)
class Ends:
    """The weights before the first layer and after the last.

    embedding: [rows, hidden], on the device or in host memory
    norm: [hidden], or of all residual streams, on the device
    head: [rows, hidden], on the device
    mean: matrices of the gated mean of residual streams, which narrow and widen; None if there is
        one stream
    ngrams: the table of n-gram embeddings, or None
    per_layer_inputs: the table of per-layer embeddings, or None
    first: token of the first row, if ranks share the vocabulary
    widths: number of rows of each rank
    """

    embedding: Weight
    norm: torch.Tensor
    head: Weight
    mean: tuple[Weight, Weight] | None = None
    ngrams: NGramTable | None = None
    per_layer_inputs: PerLayerTable | None = None
    first: int = 0
    widths: Sequence[int] = ()


class Model:
    """The forward pass. Holds everything except the layers: embedding, norm, head and rope.

    If ranks share the model, each has some heads, some MLP columns and some vocabulary rows
    (Megatron-LM, Shoeybi et al., 2019). A forward then takes two all-reduces per layer, another
    small one if a norm of the layer spans several ranks, one of the embeddings, and one gathering
    of logits.

    config: config of this rank's share
    ends: weights before the first layer and after the last
    device: device that computes
    ranks: those that share the model
    """

    def __init__(
        self,
        config: ModelConfig,
        ends: Ends,
        rope: Rope,
        device: torch.device,
        ranks: Ranks | None = None,
        *,
        same_bits: bool = False,
    ) -> None:
        """same_bits: whether a row's results have the same bits in every forward"""
        self.config = config
        self._same_bits = same_bits
        self.rope = rope
        self.device = device
        self.ends = ends
        self.ranks = ranks or Alone()
        self._embedding_scale = config.embedding_scale
        if config.embedding_scale != 1:
            # As in transformers' Gemma, the factor is rounded to the dtype of the embeddings.
            self._embedding_scale = float(torch.tensor(config.embedding_scale).to(ends.norm.dtype))
        self._norm = Norm(config.norm_kind, config.norm_eps)
        self._mixers = [
            mixer_layer(spec, self._norm, place, self.ranks)
            for spec, place in zip(config.layers, config.kv_places, strict=True)
        ]
        self._sums = Sums(self.ranks, ends.norm.dtype)
        self._mlps = [mlp_layer(spec, self._norm, self._sums) for spec in config.layers]
        self._streams = config.streams and LayersOfStreams(config, self._norm, self._sums)

    def for_drafts(self) -> Model:
        """Return this model without the same bits, which drafts need not have, where they cost
        time: a processor's kernels keep them for few rows in any case.
        """
        if backend(self.device) == HOST:
            return self
        model = copy(self)
        model._same_bits = False
        return model

    @property
    def recordable(self) -> bool:
        """Whether a forward can be recorded as a graph: the host computes no part of it but
        embeddings (`embeds_apart`).
        """
        if self.rope.needs_host or backend(self.device) == HOST or self.config.chooses_keys:
            return False
        # Without kernels, the host chooses the experts to multiply by.
        experts = any(spec.mlp.active for spec in self.config.layers)
        return not experts or backend(self.device) == TRITON

    @property
    def embeds_apart(self) -> bool:
        """Whether a recorded forward takes embeddings instead of tokens: the host looks them up, or
        per-layer embeddings, or ranks do, of which each may have its part in host memory.
        """
        on_host = self.ends.embedding.device != self.device or self.config.per_layer_inputs
        return self.ranks.count > 1 or bool(on_host)

    def forward(
        self,
        batch: ForwardBatch,
        weights: Weights,
        cache: Cache,
        *,
        embedded: torch.Tensor | None = None,
        chunk: int | None = None,
        each_layer: Callable[[int], None] | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """Run a forward batch. Return hidden states before the final norm, [rows, hidden].

        embedded: what `embed` returns for the tokens, which may become the hidden states in place
        chunk: number of rows that a layer computes at a time, None for all; the weights of each
            layer are requested once either way
        each_layer: called after each layer with its index
        taps: takes copies of what a drafter takes
        """
        with same_bits(self._same_bits):
            hidden, batch = self._carrying(batch, embedded)
            if self.config.streams:
                hidden = hidden.repeat(1, self.config.streams.count)
            return self._forward(hidden, batch, weights, cache, chunk, each_layer, taps)

    def _forward(
        self,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        weights: Weights,
        cache: Cache,
        chunk: int | None,
        each_layer: Callable[[int], None] | None,
        taps: Taps | None,
    ) -> torch.Tensor:
        """`forward`."""
        rotated = self._rotated(batch, hidden)
        parts = {kind: list(each.parts(chunk)) for kind, each in rotated.items()}
        here, ngrams = Place(hidden.device, hidden.dtype), self.ends.ngrams
        of_ngrams = ngrams.rows_of(batch) if ngrams else None
        for index, spec in enumerate(self.config.layers):
            if taps is not None:
                taps.take(index, hidden)
            with weights.layer(index) as layer:
                hidden = hidden_for(layer, hidden, here)
                keeps = cache if taps is None else taps.over(cache, index, spec.mixer)
                if layer.by_processor:
                    # Also where the processor is the device: as it will be beside a GPU.
                    keeps = CacheElsewhere(keeps, here)
                for part in parts[self.config.rotation_of(spec.mixer)]:
                    rows, part = hidden[part.first : part.end], batch_on(part, hidden.device)
                    if spec.ngrams:
                        found = ngrams.looked_up(of_ngrams[part.first : part.end], hidden.dtype)
                        found = found.to(hidden.device)
                        self._streams.add_ngrams(layer, rows, found, keeps, part)
                    self._layer(index, layer, rows, keeps, part)
            if each_layer is not None:
                each_layer(index)
        if taps is not None:
            taps.take(len(self.config.layers), hidden)
        return here.take(hidden)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, scaled, and those of all layers, if there are some: [tokens,
        embedded_width].
        """
        hidden = self._embedded(tokens)
        if self.config.per_layer_inputs is None:
            return hidden
        rows = self.ends.per_layer_inputs.looked_up(tokens, hidden.dtype)
        return torch.cat((hidden, rows.all().to(hidden.device)), 1)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [tokens, hidden], scaled."""
        hidden = self._looked_up(tokens)
        return hidden if self._embedding_scale == 1 else hidden * self._embedding_scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [tokens, vocab] for hidden states [tokens, hidden]. All ranks but
        the first get an empty [tokens, 0].
        """
        return self.scores(self.normed(hidden))

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [tokens, hidden] after the final norm, or the gated mean of residual
        streams.
        """
        ends, streams = self.ends, self.config.streams
        if ends.mean is None:
            return self._norm(hidden, ends.norm)
        normed = normed_streams(self._norm, hidden, ends.norm, streams.count)
        return gated_mean(normed, *ends.mean, streams.count)

    @property
    def embedded_width(self) -> int:
        """Numbers of a token that `embed` returns."""
        return self.config.hidden + self.config.per_layer_columns

    @property
    def state_width(self) -> int:
        """Numbers of a token's hidden states between layers; of a head, of the state before it."""
        return self.config.width

    def no_states(self) -> torch.Tensor:
        """Return states of no tokens, [0, state_width]."""
        return self.ends.norm.new_empty(0, self.state_width)

    def taps(self, tapped: Tapped, *rows: range) -> Taps | None:
        """Return taps for a forward of which some rows are copied; None if nothing is tapped."""
        if not tapped:
            return None
        heads = [self.config.layers[layer].mixer.kept for layer in tapped.keys]
        numbers = len(tapped.layers) * self.config.width + sum(heads)
        states = self.ends.norm.new_empty(sum(map(len, rows)), numbers)
        return Taps(tapped, states, rows, self.config.width, heads)

    def scores(self, normed: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [tokens, vocab] for normed hidden states, as `logits` does."""
        ends = self.ends
        with same_bits(self._same_bits):
            part = linear(normed, ends.head).float()
        if self.config.logit_scale != 1:
            part *= self.config.logit_scale
        if (cap := self.config.logit_cap) is not None:
            part = tanh(part.div_(cap)).mul_(cap)
        return self.ranks.gather(part, ends.widths)

    def _carrying(
        self, batch: ForwardBatch, embedded: torch.Tensor | None
    ) -> tuple[torch.Tensor, ForwardBatch]:
        """Return the embeddings of a batch, [rows, hidden], and the batch with what layers have
        beside hidden states.

        embedded: what `embed` returned; None to look it up
        """
        config, table = self.config, self.ends.per_layer_inputs
        if config.per_layer_inputs is None:
            hidden = self.embed(batch.tokens) if embedded is None else embedded
            return hidden, replace(batch, carried=Carried()) if config.kv_reusing_layers else batch
        if embedded is None and batch.rows > FEW_ROWS:
            # A prompt's rows stay on the host until their layer takes them.
            hidden = self._embedded(batch.tokens)
            rows = table.looked_up(batch.tokens, hidden.dtype)
        else:
            # One copy to the device, for which the host waits, and not one for each layer.
            embedded = self.embed(batch.tokens) if embedded is None else embedded
            hidden, whole = embedded.split((config.hidden, config.per_layer_columns), 1)
            rows = PerLayerRows(whole, config.per_layer_inputs.width)
        # Layers add to the hidden states in place.
        return hidden.clone(), replace(batch, carried=Carried(hidden, rows.of))

    def _rotated(
        self, batch: ForwardBatch, hidden: torch.Tensor
    ) -> dict[RotationKind | None, ForwardBatch]:
        """Return the batch as each kind of layer takes it. hidden: gives dtype and device"""
        batch = replace(batch, query_scale=self.rope.query_scale(batch.positions, hidden))
        rotations = self.rope.rotations(batch.positions, hidden)
        if index := self.config.index_rotation:

            def turning(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return self.rope.rotation_of(index, moved(positions, self.device), like=hidden)

            batch = replace(batch, index_rotation=turning)
        kinds = {kind: replace(batch, rotation=each) for kind, each in rotations.items()}
        return {None: batch, **kinds}

    def _looked_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of the embedding [tokens, hidden]."""
        ends = self.ends
        rows, dtype = tokens, ends.norm.dtype
        if tokens.device != ends.embedding.device:
            rows = come(tokens).to(ends.embedding.device)
        if self.ranks.count == 1:
            return lookup(ends.embedding, rows, dtype).to(self.device)
        rows = rows - ends.first
        last = ends.embedding.shape[0] - 1
        elsewhere = (rows < 0) | (rows > last)
        hidden = lookup(ends.embedding, rows.clamp(0, last), dtype)
        hidden = hidden.masked_fill_(elsewhere.unsqueeze(1), 0)
        return self.ranks.sum(hidden.to(self.device))

    def _layer(
        self,
        index: int,
        w: Views,
        hidden: torch.Tensor,
        cache: Cache,
        batch: ForwardBatch,
        mixes: torch.Tensor | None = None,
    ) -> None:
        """Add the mixer and the MLP of one layer to `hidden` [rows, hidden], in place.

        Each computes its own norm, so its temporaries are freed before the next one begins.

        mixes: input of the mixer, if it is not `hidden`
        """
        if self._streams:
            self._streams.run(index, w, hidden, self._mixers[index], cache, batch)
            return
        whole = self._fused(index, w).whole
        alone = mixes is None and self.ranks.count == 1
        if not (whole and alone and whole.run(hidden, cache, batch)):
            mixes = hidden if mixes is None else mixes
            mixer = self._mixers[index]
            # No temporary has a name here, which would keep it longer than it is needed.
            self._add(index, w, hidden, mixer(w, self._projected(index, w, mixes), cache, batch))
        spec = self.config.layers[index]
        if spec.per_layer_inputs:
            inputs = batch.carried.per_layer(index, batch.first, batch.end)
            embedded = batch.carried.embedded[batch.first : batch.end]
            if inputs.device.type == "cpu":
                # The host does not wait for the device.
                inputs = put(inputs, hidden.device, hidden.dtype)
            # The processor may compute the layer.
            given = (moved(each, hidden.device).to(hidden.dtype) for each in (embedded, inputs))
            add_per_layer_inputs(w, self._norm, hidden, *given)
        if spec.output_scale:
            hidden *= w["output_scale"]

    def _projected(self, index: int, w: Views, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the mixer of a layer takes, [rows, rows of "qkv"]."""
        before = self._fused(index, w).before
        if before and before.fits(hidden):
            projected = hidden.new_empty(hidden.shape[0], w["qkv"].shape[0])
            before.run(hidden, projected)
            return projected
        normed = self._norm(hidden, w["input_norm"]) if "input_norm" in w else hidden
        return linear(normed, w["qkv"], w.get("qkv_bias"))

    def _add(self, index: int, w: Views, hidden: torch.Tensor, mixed: torch.Tensor) -> None:
        """Add the projection of what a mixer returned, and the MLP's output, to `hidden`."""
        spec, after = self.config.layers[index], self._fused(index, w).after
        if after and self.ranks.count == 1 and after.fits(mixed, hidden):
            after.run(mixed, hidden)
            return
        mixed = self._sums.sum(linear(mixed, w["o"], w.get("o_bias")))
        mixed = self._added(spec, w.get("mixer_norm"), mixed)
        computed = self._mlps[index](w, hidden, mixed)
        if computed is not None:
            hidden += self._added(spec, w.get("mlp_norm"), computed)

    def _fused(self, index: int, w: Views) -> FusedLayer:
        """Return the computations of a layer that a processor makes at once."""
        if w.prepared is None:
            place = self.config.kv_places[index]
            w.prepared = FusedLayer.of(self.config.layers[index], self._norm, w, place)
        return w.prepared

    def _added(
        self, spec: LayerSpec, norm: torch.Tensor | None, computed: torch.Tensor
    ) -> torch.Tensor:
        """Return what a mixer or an MLP adds to the hidden states: its output, normed and scaled.

        norm: weights of the norm after it, or None
        """
        if norm is not None:
            computed = self._norm(computed, norm)
        return computed if spec.residual_scale == 1 else computed.mul_(spec.residual_scale)
