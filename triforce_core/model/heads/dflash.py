"""Computation of DFlash drafters, see `joins.DFlash`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from triforce_core.model.config import ModelConfig
from triforce_core.model.heads.head import OwnTensors
from triforce_core.model.heads.joins import Convolutions
from triforce_core.model.mlps import mlp_alone
from triforce_core.model.rope import Rope
from triforce_core.model.transformer import Model
from triforce_kernels.attention.attention import PLAIN, Softmax
from triforce_kernels.layer import rope_into
from triforce_kernels.weights.linear import linear, lookup
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.weights.layouts import Views
from triforce_offload.weights.store import Weights


class Block(NamedTuple):
    """Predictions for the positions of a block. The first position follows the text. On ranks but
    the first there are no logits.

    logits: float32, [positions, vocab], or of the candidates, [positions, candidates]
    candidates: the likeliest tokens, [positions, candidates] int64; None without a selector
    gates: factors of the vector of the token before, [positions, rank]; None without a selector
    vectors: of the candidates, [positions, candidates, rank]; None without a selector
    """

    logits: torch.Tensor
    candidates: torch.Tensor | None = None
    gates: torch.Tensor | None = None
    vectors: torch.Tensor | None = None


class DFlashModel(Model):
    """A drafter. Tokens of the text enter as hidden states of the model, tokens of a block as
    embeddings. Ranks that share the model share its layers.

    tapped: what it takes of the model's forwards
    """

    def __init__(self, config: ModelConfig, target: Model, own: OwnTensors) -> None:
        self.join = config.joins
        self.tapped = self.join.taps(len(target.config.layers))
        self._own = own.tensors
        self._vocab = target.config.vocab
        ends = replace(target.ends, norm=own.tensors["norm"])
        rope = Rope(config, target.device, None, config.trained_positions)
        super().__init__(config, ends, rope, target.device, target.ranks)
        self._alone = [mlp_alone(spec, self._norm, self._sums) for spec in config.layers]
        self._kind = config.rotation_of(config.layers[0].mixer)

    def states(self, tapped: torch.Tensor) -> torch.Tensor:
        """Return the states [rows, hidden] of tokens of the text.

        tapped: hidden states of the model, [rows, taps * hidden of the model]
        """
        return self._norm(linear(tapped, self._own["fc"]), self._own["state_norm"])

    def remember(
        self, positions: torch.Tensor, states: torch.Tensor, weights: Weights, cache: Cache
    ) -> None:
        """Write the keys and values of the text's tokens behind those that a cache has.

        positions: of the tokens, [rows]
        """
        batch = ForwardBatch(positions, positions)
        batch = self._rotated(batch, states)[self._kind]
        writing = _Writing(cache)
        for index, mixer in enumerate(self._mixers):
            with weights.layer(index) as w:
                mixer(w, linear(states, w["qkv"], w.get("qkv_bias")), writing, batch)

    def block(
        self,
        batch: ForwardBatch,
        weights: Weights,
        cache: Cache,
        embedded: torch.Tensor | None = None,
    ) -> Block:
        """Run a block: the text's last token and mask tokens, with padding after them. Return what
        it predicts.

        batch: its rows; `drafted` says which rows of the block each one sees where a layer is not
            causal
        embedded: what `embed` returns for the tokens, which become the hidden states in place
        """
        hidden = self.embed(batch.tokens) if embedded is None else embedded
        both = self._rotated(batch, hidden)[self._kind]
        causal = replace(both, drafted=None)
        for index, is_causal in enumerate(self.join.causal):
            with weights.layer(index) as w:
                self._run(index, w, hidden, cache, causal if is_causal else both)
        return self._predicted(self.normed(hidden[1 : self.join.rows]))

    def after(self, block: Block, position: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32 logits for a position of a block, [n, vocab], one row for each token [n]
        that may precede it. Tokens that are no candidates have a logit of -inf.
        """
        if block.candidates is None:
            return block.logits[position].expand(len(tokens), -1).clone()
        gated = lookup(self._own["before"], tokens, torch.float32) * block.gates[position]
        pairs = torch.addmm(block.logits[position], gated, block.vectors[position].T)
        logits = pairs.new_full((len(tokens), self._vocab), float("-inf"))
        return logits.scatter_(1, block.candidates[position].expand(len(tokens), -1), pairs)

    def _run(
        self, index: int, w: Views, hidden: torch.Tensor, cache: Cache, batch: ForwardBatch
    ) -> None:
        """Add attention and the MLP of a layer to `hidden`, in place."""
        spec = self.join.convolutions

        def around(part: str, x: torch.Tensor) -> _Around:
            return _Around(spec, w[f"{part}_conv"], linear(x, w[f"{part}_conv_from"]))

        x = self._norm(hidden, w["input_norm"])
        outer = around("mixer", x) if spec else None
        x = outer.before(x) if outer else x
        mixed = self._mixers[index](w, linear(x, w["qkv"], w.get("qkv_bias")), cache, batch)
        mixed = self._sums.sum(linear(mixed, w["o"], w.get("o_bias")))
        hidden += outer.after(mixed) if outer else mixed
        x = self._norm(hidden, w["post_norm"])
        outer = around("mlp", x) if spec else None
        computed = self._alone[index](w, outer.before(x) if outer else x, hidden)
        hidden += outer.after(computed) if outer else computed

    def _predicted(self, normed: torch.Tensor) -> Block:
        """Return what a block predicts. normed: normed hidden states of its positions"""
        logits, selector = self.scores(normed), self.join.selector
        if selector is None or self.ranks.index:
            return Block(logits)
        best, wide = logits.topk(selector.candidates), torch.float32
        vectors = lookup(self._own["after"], best.indices.flatten(), wide)
        vectors = vectors.unflatten(0, best.indices.shape)
        return Block(*best, linear(normed, self._own["gate"]).to(wide), vectors)


class _Around:
    """The convolutions around attention or the MLP of a layer."""

    def __init__(self, spec: Convolutions, base: torch.Tensor, computed: torch.Tensor) -> None:
        """base: learned weights, [2 * taps, hidden]
        computed: weights of each row's groups of channels, [rows, 2 * taps * groups]
        """
        groups = base.shape[1] // spec.group
        computed = computed.unflatten(1, (2, spec.taps, groups, 1))
        self._weights = base.view(2, spec.taps, groups, spec.group) + computed

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution of what comes in, [rows, hidden]."""
        return self._convolved(x, 0)

    def after(self, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution of what goes out, [rows, hidden]."""
        return self._convolved(x, 1)

    def _convolved(self, x: torch.Tensor, side: int) -> torch.Tensor:
        weights = self._weights[:, side]
        grouped = x.unflatten(1, weights.shape[2:])
        out = weights[:, 0] * grouped
        for tap in range(1, weights.shape[1]):
            out[tap:].add_(weights[tap:, tap] * grouped[:-tap])
        return out.flatten(1)


class _Writing:
    """A cache that keeps keys and values, and attends to nothing."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Return the queries, in the place of what attention gives. See Cache.attend."""
        keys = self._cache.dense(layer, batch)
        return rope_into(qkv, *batch.rotation, keys.key, keys.value, keys.start, keys.scale)
