"""Drafters that draft from the hidden states of the level above."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.drafters.model_proposer import ModelDrafter, ModelProposer
from triforce_core.params import SamplingParams


class DrafterOfStates(ModelDrafter, ABC):
    """A drafter that takes hidden states of the text's tokens.

    taps: the layers of the model whose input it takes
    window: number of the text's last tokens whose states are used at most
    first: number of the text's first tokens whose states are used too
    """

    taps: tuple[int, ...]
    window: int
    first: int

    def proposer(self, params: SamplingParams, rule: Rule) -> ModelProposer:
        """Drafter.proposer."""
        return ModelProposer(self, params, rule)

    @abstractmethod
    def note(self, start: int, tapped: torch.Tensor) -> None:
        """Take the hidden states [tokens, taps * hidden] of the text's tokens from `start` on, at
        most `window` of them, and forget those of later tokens.
        """

    @abstractmethod
    def run(
        self,
        tokens: torch.Tensor,
        start: tuple[int, ...] | None,
        parents: tuple[int, ...] | None,
    ) -> object:
        """Run this rank's part of a forward, with what the first rank says about its tokens [n]."""

    @abstractmethod
    def roll_back(self, tokens: int) -> None:
        """Drafter.roll_back."""

    @abstractmethod
    def close(self) -> None:
        """Drafter.close."""
