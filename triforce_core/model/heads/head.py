"""Computation of heads, with one class for each kind of head in `joins`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from triforce_core.model.config import ModelConfig
from triforce_core.model.heads.joins import Tapped
from triforce_core.model.rope import Rope
from triforce_core.model.transformer import Ends, Model
from triforce_kernels.weights.linear import Weight, linear
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.weights.layouts import Views
from triforce_offload.weights.store import Weights


@dataclass(frozen=True)
class OwnTensors:
    """What a head has of its own outside its layer.

    tensors: see `Join.ends`
    embedding: None if it uses the model's
    tokens: the model's token of each token of its output, [vocab] int64; None if they are the same
    """

    tensors: Views
    embedding: Weight | None
    tokens: torch.Tensor | None


class After(NamedTuple):
    """What follows pairs: the states for the next ones, [rows, hidden], and float32 logits [rows,
    vocab] of the model's tokens.
    """

    state: torch.Tensor
    logits: torch.Tensor


class Head(Model, ABC):
    """A layer that continues a model. It runs pairs of a token and the state of the token before.

    tapped: what it takes of the model's forwards
    """

    tapped: Tapped

    @abstractmethod
    def states(self, tapped: torch.Tensor) -> torch.Tensor:
        """Return the states [rows, hidden] that pairs begin from.

        tapped: hidden states of the model, [rows, taps * hidden of the model]
        """

    @abstractmethod
    def after(self, hidden: torch.Tensor) -> After:
        """Return what follows pairs, given what `run` returned for them, [rows, hidden]."""

    @abstractmethod
    def first_positions(self, count: int, begin: int) -> range:
        """Return the positions as which the first tokens of a text are rotated, if the next pair is
        that of the token at `begin`.
        """

    @abstractmethod
    def _joined(
        self, w: Views, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's input [rows, hidden], and the mixer's input if that is another."""

    def run(
        self,
        batch: ForwardBatch,
        states: torch.Tensor,
        weights: Weights,
        cache: Cache,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run pairs. Return hidden states before the final norm, [rows, hidden].

        batch: the pairs' tokens
        states: their states, [rows, hidden]
        embedded: what `embed` returns for the tokens
        """
        kind = self.config.rotation_of(self.config.layers[0].mixer)
        embedded = self.embed(batch.tokens) if embedded is None else embedded
        with weights.layer(0) as layer:
            hidden, mixes = self._joined(layer, embedded, states)
            self._layer(0, layer, hidden, cache, self._rotated(batch, hidden)[kind], mixes)
        return hidden


class MtpHead(Head):
    """See `joins.Mtp`. Ranks that share the model share the head."""

    def __init__(self, config: ModelConfig, target: Model, own: OwnTensors) -> None:
        self._target = target
        self.tapped = config.joins.taps(len(target.config.layers))
        ends = replace(target.ends, norm=own.tensors["norm"])
        super().__init__(config, ends, target.rope, target.device, target.ranks)

    def states(self, tapped: torch.Tensor) -> torch.Tensor:
        """Head.states."""
        return self._target.normed(tapped)

    def after(self, hidden: torch.Tensor) -> After:
        """Head.after."""
        state = self.normed(hidden)
        return After(state, self.scores(state))

    def first_positions(self, count: int, begin: int) -> range:
        """Head.first_positions: their own."""
        return range(1, count + 1)

    def _joined(
        self, w: Views, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Head._joined."""
        both = self._norm(embedded, w["token_norm"]), self._norm(states, w["state_norm"])
        return linear(torch.cat(both, 1), w["join"]), None


class StreamsMtpHead(MtpHead):
    """See `joins.StreamsMtp`."""

    def __init__(self, config: ModelConfig, target: Model, own: OwnTensors) -> None:
        self._target = target
        self.tapped = config.joins.taps(len(target.config.layers))
        tensors = own.tensors
        mean = tensors["last_mix_down"], tensors["last_mix_up"]
        ends = replace(target.ends, norm=tensors["last_mix_norm"], mean=mean, ngrams=None)
        Model.__init__(self, config, ends, target.rope, target.device, target.ranks)

    def states(self, tapped: torch.Tensor) -> torch.Tensor:
        """Head.states."""
        return tapped

    def after(self, hidden: torch.Tensor) -> After:
        """Head.after."""
        return After(hidden, self.scores(self.normed(hidden)))

    def _joined(
        self, w: Views, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Head._joined."""
        count = self.config.streams.count
        token = linear(self._norm(embedded, w["token_norm"]), w["join_token"])
        streams = self._norm(states, w["state_norm"]).view(-1, self.config.hidden)
        joined = linear(streams, w["join_state"]).unflatten(0, (-1, count))
        return (joined + token.unsqueeze(1)).flatten(1), None


class Eagle3Head(Head):
    """See `joins.Eagle3`."""

    def __init__(self, config: ModelConfig, target: Model, own: OwnTensors) -> None:
        join, tensors = config.joins, own.tensors
        self.tapped = join.taps(len(target.config.layers))
        self._norms_residual, self._norms_output = join.norms_residual, join.norms_output
        self._combine = tensors["fc"]
        self._tap_norms = tensors["tap_norm"].chunk(join.tap_norms) if join.tap_norms else ()
        self._tokens = own.tokens
        self._vocab = target.config.vocab
        embedding = target.ends.embedding if own.embedding is None else own.embedding
        ends = Ends(embedding, tensors["norm"], tensors["head"])
        rope = Rope(config, target.device, None, config.trained_positions)
        super().__init__(config, ends, rope, target.device)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Model.embed: tokens that its own embedding lacks are the last one, as those of the
        model's padding.
        """
        return super().embed(tokens.clamp(max=self.ends.embedding.shape[0] - 1))

    def states(self, tapped: torch.Tensor) -> torch.Tensor:
        """Head.states."""
        if self._tap_norms:
            parts = tapped.split([len(weight) for weight in self._tap_norms], 1)
            normed = zip(parts, self._tap_norms, strict=True)
            tapped = torch.cat([self._norm(part, weight) for part, weight in normed], 1)
        return linear(tapped, self._combine)

    def after(self, hidden: torch.Tensor) -> After:
        """Head.after: tokens that the head does not know have a logit of -inf."""
        normed = self.normed(hidden)
        state, known = normed if self._norms_output else hidden, self.scores(normed)
        if self._tokens is None:
            return After(state, known)
        logits = known.new_full((len(known), self._vocab), float("-inf"))
        return After(state, logits.index_copy_(1, self._tokens, known))

    def first_positions(self, count: int, begin: int) -> range:
        """Head.first_positions: directly before the others, as heads are trained on short texts."""
        return range(begin - count, begin)

    def _joined(
        self, w: Views, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Head._joined."""
        normed = self._norm(states, w["state_norm"])
        both = torch.cat((self._norm(embedded, w["token_norm"]), normed), 1)
        # The layer adds to its input in place.
        return normed if self._norms_residual else states.clone(), both
