"""Forwards with inputs at fixed addresses, recorded as CUDA graphs.

On a GPU, launching the kernels of a forward over a few rows one by one may take longer than running
them. So a forward of each size is recorded once it has run a few times, and replayed from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from triforce_core.decoding.drafters.drafted_rows import TreeRows
from triforce_core.model.heads.joins import NOTHING, Tapped
from triforce_core.model.heads.taps import Taps
from triforce_core.model.transformer import Model
from triforce_kernels import warmup
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.graphs import Recorder, Run
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.caches.fixed import FixedCache
from triforce_offload.memory.device import put
from triforce_offload.ranks import all_agree
from triforce_offload.weights.store import Weights

# Runs of a forward before it is recorded: libraries initialise themselves at first use.
USES_BEFORE = 2

Result = TypeVar("Result")


def padded(tokens: int) -> int:
    """Return the size of the recorded forward for `tokens` tokens, a power of two."""
    return 1 << (tokens - 1).bit_length()


def fits(kv: DenseKV, size: int, rows: TreeRows | None, drafted: int) -> bool:
    """Return whether a forward of `size` rows has room behind the KV, and, if it continues a tree,
    whether rows of the tree and padding are at most `drafted`.
    """
    columns = 0 if rows is None else rows.visible.shape[1] + size - len(rows.visible)
    return kv.has_room(size) and columns <= drafted


class Inputs(NamedTuple):
    """The inputs of a forward.

    embedded: embeddings of the tokens, for a model that `embeds_apart`; a forward may change them
    states: the state before each token, if the model is a head
    taps: takes what a drafter takes, if one does
    """

    batch: ForwardBatch
    embedded: torch.Tensor | None
    states: torch.Tensor | None
    taps: Taps | None


class RecordedForwards(Generic[Result]):
    """Forwards of a model over a cache, one of each size, with padding behind the real rows.

    Eager and recorded forwards compute the same values, up to rounding.
    """

    def __init__(
        self,
        model: Model,
        cache: FixedCache,
        compute: Callable[[Inputs], Result],
        recorder: Recorder,
        name: str,
        *,
        taps: Tapped = NOTHING,
        has_states: bool = False,
    ) -> None:
        """compute: a forward over the cache; returns the same tensors each time once it is recorded
        name: of the forwards, in warnings
        taps: what each forward keeps for a drafter
        has_states: whether the model is a head, whose rows have states
        """
        self._model = model
        self._cache = cache
        self._compute = compute
        self._recorder = recorder
        self._name = name
        self._taps = taps
        self._has_states = has_states
        self._forwards: dict[tuple[int, bool], _FixedForward[Result]] = {}

    def run(
        self,
        size: int,
        tokens: torch.Tensor,
        positions: int | torch.Tensor,
        rows: TreeRows | None = None,
        drafted: int = 0,
        states: torch.Tensor | None = None,
    ) -> tuple[Result, torch.Tensor | None]:
        """Run tokens [n] as a forward of `size` rows.

        positions: of the tokens, [n], or that of the first, which the others follow; ignored if
            `rows` says them
        rows: positions of the tokens, and what each sees, if they are in a tree
        drafted: number of keys that rows of a tree may not see, their own included
        states: the state before each token, [n, hidden], if the model is a head

        Returns the result of all rows and the tapped hidden states of the tokens' rows, or None.
        Both are valid until the next forward that has the same recorder.
        """
        kind = size, rows is not None
        forward = self._forwards.get(kind)
        if forward is None:
            forward = self._forwards[kind] = self._new(size, rows, drafted)
        forward.take(tokens, positions, rows, states)
        if forward.uses == USES_BEFORE:
            self._record(forward, size)
        taps = forward.inputs.taps
        return forward.run(), taps and taps.states[: tokens.shape[0]]

    def _new(self, size: int, rows: TreeRows | None, drafted: int) -> _FixedForward[Result]:
        model, device = self._model, self._model.device
        tokens, positions = torch.zeros(2, size, dtype=torch.int64, device=device)
        visible = lines = None
        if rows is not None:
            visible = torch.zeros(size, drafted, dtype=torch.bool, device=device)
            if rows.lines is not None:
                lines = torch.zeros(size, rows.lines.shape[1], dtype=torch.int64, device=device)
        zeros = model.no_states().new_zeros
        inputs = Inputs(
            ForwardBatch(tokens, positions, drafted=visible, lines=lines),
            zeros(size, model.embedded_width) if model.embeds_apart else None,
            zeros(size, model.state_width) if self._has_states else None,
            model.taps(self._taps, range(size)),
        )
        return _FixedForward(model, self._cache, self._compute, inputs)

    def _record(self, forward: _FixedForward[Result], size: int) -> None:
        why, ranks = "", self._model.ranks
        try:
            warmup.note()
            forward.record(self._recorder)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
        if not all_agree(ranks, not why):
            why = why or "another rank could not"
        if why:
            # The forward still runs kernel by kernel; it is only slower.
            forward.forget_recording()
            warnings.warn(
                f"{self._name}: forwards of {size} tokens are launched kernel by kernel, since "
                f"recording them failed: {why}",
                RuntimeWarning,
                stacklevel=2,
            )


class _FixedForward(Generic[Result]):
    """A forward of a fixed number of tokens, with inputs at fixed addresses.

    Padding tokens come after the real ones, which therefore do not attend to them. Their KV is
    written after the end of the KV.
    """

    def __init__(
        self,
        model: Model,
        cache: FixedCache,
        compute: Callable[[Inputs], Result],
        inputs: Inputs,
    ) -> None:
        """inputs: which all forwards overwrite"""
        self.inputs = inputs
        self.uses = 0
        self._model = model
        self._cache = cache
        self._compute = compute
        self._steps = torch.arange(inputs.batch.rows, device=model.device)
        self._replay: Run[Result] | None = None

    def take(
        self,
        tokens: torch.Tensor,
        positions: int | torch.Tensor,
        rows: TreeRows | None,
        states: torch.Tensor | None,
    ) -> None:
        """Set the inputs."""
        batch, embedded, own_states, _ = self.inputs
        count, device = tokens.shape[0], self._model.device
        batch.tokens[:count] = tokens
        # Padding repeats the last token: its keys and values are as finite as those of real rows.
        batch.tokens[count:] = tokens[-1:]
        if embedded is not None:
            embedded.copy_(self._model.embed(batch.tokens))
        if states is not None:
            own_states[:count] = states
            own_states[count:] = states[-1:]
        if rows is not None:
            there = rows.positions.device == device
            batch.positions[:count] = rows.positions if there else put(rows.positions, device)
            self._take_rows(rows)
        elif isinstance(positions, int):
            torch.add(self._steps, positions, out=batch.positions)
        else:
            batch.positions[:count] = positions
        self._cache.begin()

    def run(self) -> Result:
        """Return the result of all rows; a recorded forward returns the same tensors each time."""
        self.uses += 1
        return self._run() if self._replay is None else self._replay()

    def record(self, recorder: Recorder) -> None:
        self._replay = recorder.record(self._run)

    def forget_recording(self) -> None:
        self._replay = None

    def _run(self) -> Result:
        batch, embedded, states, taps = self.inputs
        embedded = None if embedded is None else embedded.clone()
        # A batch computes what it is asked for once.
        batch = ForwardBatch(
            batch.tokens, batch.positions, drafted=batch.drafted, lines=batch.lines
        )
        return self._compute(Inputs(batch, embedded, states, taps))

    def _take_rows(self, rows: TreeRows) -> None:
        """Take over how rows follow one another; padding comes after them."""
        batch = self.inputs.batch
        count, own = rows.visible.shape
        size, drafted = batch.drafted.shape
        padding = size - count
        # Keys before the tree, which all rows see, and those of the padding, of which each row sees
        # its own: attention to no key at all has no value.
        before = drafted - padding - own
        seen = torch.zeros(size, drafted, dtype=torch.bool)
        seen[:, :before] = True
        seen[:count, before : before + own] = rows.visible
        seen[count:, drafted - padding :].fill_diagonal_(True)
        batch.drafted.copy_(put(seen, self._model.device, torch.bool))
        if batch.lines is not None:
            lines = torch.arange(size).unsqueeze(1).repeat(1, batch.lines.shape[1])
            lines[:count] = rows.lines
            batch.lines.copy_(put(lines, self._model.device))


def forwards_of(
    model: Model, weights: Weights, cache: FixedCache
) -> Callable[[Inputs], torch.Tensor]:
    """Return the forwards of a model, to hidden states [rows, hidden]."""

    def compute(inputs: Inputs) -> torch.Tensor:
        batch, embedded, _, taps = inputs
        return model.forward(batch, weights, cache, embedded=embedded, taps=taps)

    return compute
