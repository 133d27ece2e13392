"""Drafters that draft from the hidden states of the level above."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.contexts import calls
from triforce_core.decoding.drafters.model_proposer import ModelDrafter, ModelProposer
from triforce_core.decoding.trees.growing import Tree
from triforce_core.model.heads.head import After
from triforce_core.model.heads.joins import Tapped
from triforce_core.model.transformer import Model
from triforce_core.params import SamplingParams
from triforce_offload.graphs import Recorder
from triforce_offload.link.trace import Tracer
from triforce_offload.memory.device import put
from triforce_offload.weights.store import ResidentWeights

KV = TypeVar("KV")


@dataclass(frozen=True)
class Given(Generic[KV]):
    """What a drafter of states is made of.

    kv: room for its keys and values
    tell: sends a call to the other ranks
    release: returns the room for states to the budget
    recorder: None to run everything eagerly
    """

    model: Model
    weights: ResidentWeights
    kv: KV
    trace: Tracer
    tell: Callable[[calls.ContextCall], None]
    release: Callable[[], None]
    recorder: Recorder | None = None


class DrafterOfStates(ModelDrafter, Generic[KV], ABC):
    """A drafter that takes hidden states of the text's tokens.

    taps: what it takes of the model's forwards
    window: number of the text's last tokens of which it uses what it takes, at most
    first: number of the text's first tokens likewise
    """

    taps: Tapped
    window: int
    first: int

    def __init__(self, given: Given[KV]) -> None:
        self.device = given.model.device
        self.taps = given.model.tapped
        self._weights, self._kv = given.weights, given.kv
        self._trace, self._tell = given.trace, given.tell
        self._release = given.release
        # Of recorded forwards, where there are any.
        self._recorded = None

    def proposer(self, params: SamplingParams, rule: Rule) -> ModelProposer:
        """Drafter.proposer."""
        return ModelProposer(self, params, rule)

    @abstractmethod
    def note(self, start: int, tapped: torch.Tensor) -> None:
        """Take what is tapped, [tokens, numbers], of the text's tokens from `start` on, at most
        `window` of them, and forget that of later tokens.
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

    def close(self) -> None:
        """Drafter.close."""
        self._recorded = None
        self._kv.close()
        self._release()


class TokenDrafter(DrafterOfStates[KV], ABC):
    """A drafter that runs a row for each token, with the state after the row that it follows.

    If ranks divide the drafter, each has a part of it, and the same states. The first rank decides
    which rows run, and tells the others.
    """

    def __init__(self, given: Given[KV]) -> None:
        super().__init__(given)
        # `start` of the tokens of the text that run next, see `run`.
        self._start: tuple[int, ...] | None = None
        # States after the text and after each drafted row that was run.
        self._states = given.model.no_states()
        # Index of each row of a tree among the drafted rows.
        self._ran_rows: dict[int, int] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """ModelDrafter.forward: run what `catch_up` prepared, or a drafted token [1]."""
        start, self._start = self._start, None
        if start:
            self._ran_rows = {}
        return self._run_on_all(calls.RunHead(tokens, start, None))

    def forward_tree(self, tree: Tree, rows: Sequence[int]) -> torch.Tensor:
        """ModelDrafter.forward_tree: the given rows alone."""
        ran = {0: -1} | self._ran_rows
        parents = tuple(ran[tree.parents[row - 1]] for row in rows)
        held = len(self._states) - 1
        self._ran_rows |= {row: held + place for place, row in enumerate(rows)}
        tokens = put([tree.tokens[row - 1] for row in rows], self.device)
        return self._run_on_all(calls.RunHead(tokens, None, parents))

    @abstractmethod
    def run(
        self,
        tokens: torch.Tensor,
        start: tuple[int, ...] | None,
        parents: tuple[int, ...] | None,
    ) -> torch.Tensor:
        """Do what `forward` and `forward_tree` do on this rank. Ranks but the first return no
        logits, [rows, 0].

        start: what `catch_up` prepared; None for drafted tokens
        parents: for each drafted token the drafted row that it follows, or -1 for the text; None
            for a chain after the last row
        """

    def _before(self, parents: tuple[int, ...] | None) -> torch.Tensor:
        """Return the states before drafted tokens, [rows, state_width]. parents: see `run`"""
        if parents is None:
            return self._states[-1:]
        return self._states[put([parent + 1 for parent in parents], self.device)]

    def _have_run(self, after: After, *, of_text: bool) -> None:
        """Note the states after rows of the text, or after drafted ones."""
        self._states = after.state if of_text else torch.cat((self._states, after.state))

    def have_drawn(self, tokens: torch.Tensor) -> None:
        """ModelDrafter.have_drawn: rows of drafted tokens run again with other states."""

    def _run_on_all(self, call: calls.RunHead) -> torch.Tensor:
        """Run a call on every rank that has a part of the drafter."""
        self._tell(call)
        return self.run(call.tokens, call.start, call.parents)
