"""Computation of Gemma 4 assistants, see `joins.Assistant`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from triforce_core.model.config import ModelConfig
from triforce_core.model.heads.head import After, OwnTensors
from triforce_core.model.transformer import Model
from triforce_kernels.layer import rotate
from triforce_kernels.weights.linear import linear
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.weights.store import Weights


class AssistantModel(Model):
    """An assistant. Ranks that share the model share its layers and its output matrix; each attends
    to the keys of its own heads.

    tapped: what it takes of the model's forwards
    """

    def __init__(self, config: ModelConfig, target: Model, own: OwnTensors) -> None:
        self._target = target
        self._own = own.tensors
        self.tapped = config.joins.taps(len(target.config.layers))
        ends = replace(target.ends, norm=own.tensors["norm"], head=own.tensors["head"])
        super().__init__(config, ends, target.rope, target.device, target.ranks)

    @property
    def embedded_width(self) -> int:
        """Model.embedded_width: the embedding is the model's."""
        return self.config.joins.width

    @property
    def state_width(self) -> int:
        """Model.state_width."""
        return self.config.joins.width

    def step(
        self,
        batch: ForwardBatch,
        states: torch.Tensor,
        weights: Weights,
        cache: Cache,
        embedded: torch.Tensor | None = None,
    ) -> After:
        """Run tokens, each with the state before it. Return what follows them.

        batch: the tokens, at the position of the text's last one
        states: [rows, width of the model]
        embedded: what `embed` returns for the tokens
        """
        embedded = self.embed(batch.tokens) if embedded is None else embedded
        hidden = linear(torch.cat((embedded, states), 1), self._own["join"])
        hidden = self._forward(hidden, batch, weights, cache, None, None, None)
        normed = self.normed(hidden)
        return After(linear(normed, self._own["state"]), self.scores(normed))

    def states(self, tapped: torch.Tensor) -> torch.Tensor:
        """Return the states after tokens of the text, [rows, width].

        tapped: what was tapped, [rows, numbers]
        """
        return self._target.normed(tapped[:, : self.state_width])

    def keys(self, tapped: torch.Tensor, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the keys and values of tokens, rotated, for each layer of `tapped.keys`: [2,
        kv_heads, rows, head_dim].

        tapped: what was tapped, [rows, numbers]
        positions: of the tokens, [rows]
        """
        rotations = self.rope.rotations(positions, tapped)
        rest = tapped[:, self.state_width :]
        for layer in self.tapped.keys:
            mixer = self._target.config.layers[layer].mixer
            own, rest = rest[:, : mixer.kept], rest[:, mixer.kept :]
            heads = own.unflatten(1, (2, mixer.kv_heads, mixer.head_dim)).permute(1, 2, 0, 3)
            key = rotate(heads[0], *rotations[self.config.rotation_of(mixer)])
            yield torch.stack((key, heads[1]))
