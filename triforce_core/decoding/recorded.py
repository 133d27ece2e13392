"""Forwards with inputs at fixed addresses, recorded as CUDA graphs.

On a GPU, launching the kernels of a forward over a few rows one by one may take longer than running
them. So a forward of each size is recorded once it has run a few times, and replayed from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from triforce_core.decoding.drafters.drafted_rows import TreeRows
from triforce_core.model.heads.taps import Taps
from triforce_core.model.transformer import Model
from triforce_kernels import warmup
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.graphs import Recorder, Run
from triforce_offload.kv.caches.fixed import FixedCache
from triforce_offload.memory.device import put
from triforce_offload.weights.store import Weights

# Runs of a forward before it is recorded: libraries initialise themselves at first use.
USES_BEFORE = 2


def padded(tokens: int) -> int:
    """Return the size of the recorded forward for `tokens` tokens, a power of two."""
    return 1 << (tokens - 1).bit_length()


class RecordedForwards:
    """Forwards of a model over a cache, one of each size, with padding behind the real rows.

    Eager and recorded forwards compute the same values, up to rounding.

    recorded: number of forwards recorded so far
    """

    def __init__(
        self,
        model: Model,
        weights: Weights,
        cache: FixedCache,
        recorder: Recorder,
        name: str,
        *,
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """name: of the forwards, in warnings
        finish: computes the result of a forward from its hidden states, as part of the graph
        taps: layers of which each forward keeps the input, see `Taps`
        """
        self.recorded = 0
        self._model = model
        self._weights = weights
        self._cache = cache
        self._recorder = recorder
        self._name = name
        self._finish = finish
        self._taps = taps
        self._forwards: dict[tuple[int, bool], _FixedForward] = {}

    def run(
        self,
        size: int,
        tokens: torch.Tensor,
        position: int,
        rows: TreeRows | None = None,
        drafted: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run tokens [n], the first at `position`, as a forward of `size` rows.

        rows: positions of the tokens, and what each sees, if they are in a tree
        drafted: number of keys that rows of a tree may not see, their own included

        Returns the result and the tapped hidden states of the tokens' rows, or None: both are
        valid until the next call.
        """
        kind = size, rows is not None
        forward = self._forwards.get(kind)
        if forward is None:
            taps = self._model.taps(self._taps, range(size))
            tree = None if rows is None else _Tree.of(rows, size, drafted, self._model.device)
            forward = self._forwards[kind] = _FixedForward(
                self._model, self._weights, self._cache, self._finish, size, tree, taps
            )
        forward.take(tokens, position, rows)
        if forward.uses == USES_BEFORE:
            self._record(forward, size)
        count = tokens.shape[0]
        return forward.run()[:count], forward.taps and forward.taps.states[:count]

    def clear(self) -> None:
        """Release the forwards and their memory."""
        self._forwards.clear()

    def _record(self, forward: _FixedForward, size: int) -> None:
        try:
            warmup.note()
            forward.record(self._recorder)
            self.recorded += 1
        except RuntimeError as error:
            # The forward still runs kernel by kernel; it is only slower.
            warnings.warn(
                f"{self._name}: forwards of {size} tokens are launched kernel by kernel, since "
                f"recording them failed: {str(error).splitlines()[0]}",
                RuntimeWarning,
                stacklevel=2,
            )


class _Tree:
    """How the rows of a forward of a fixed size follow one another, at fixed addresses.

    visible: `ForwardBatch.drafted`
    lines: `ForwardBatch.lines`, or None
    """

    def __init__(
        self, visible: torch.Tensor, lines: torch.Tensor | None, device: torch.device
    ) -> None:
        self.visible = visible
        self.lines = lines
        self._device = device

    @classmethod
    def of(cls, rows: TreeRows, size: int, drafted: int, device: torch.device) -> _Tree:
        """Return one for trees such as `rows`, whose rows may not see the last `drafted` keys."""
        visible = torch.zeros(size, drafted, dtype=torch.bool, device=device)
        lines = None
        if rows.lines is not None:
            lines = torch.zeros(size, rows.lines.shape[1], dtype=torch.int64, device=device)
        return cls(visible, lines, device)

    def take(self, rows: TreeRows) -> None:
        """Take over how rows follow one another; padding comes after them."""
        count, own = rows.visible.shape
        size, drafted = self.visible.shape
        padding = size - count
        # Keys before the tree, which all rows see, and those of the padding, of which each row sees
        # its own: attention to no key at all has no value.
        before = drafted - padding - own
        seen = torch.zeros(size, drafted, dtype=torch.bool)
        seen[:, :before] = True
        seen[:count, before : before + own] = rows.visible
        seen[count:, drafted - padding :].fill_diagonal_(True)
        self.visible.copy_(put(seen, self._device, torch.bool))
        if self.lines is not None:
            lines = torch.arange(size).unsqueeze(1).repeat(1, self.lines.shape[1])
            lines[:count] = rows.lines
            self.lines.copy_(put(lines, self._device))


class _FixedForward:
    """A forward of exactly `size` tokens, with inputs at fixed addresses.

    Padding tokens come after the real ones, which therefore do not attend to them. Their KV is
    written after the end of the KV.
    """

    def __init__(
        self,
        model: Model,
        weights: Weights,
        cache: FixedCache,
        finish: Callable[[torch.Tensor], torch.Tensor] | None,
        size: int,
        tree: _Tree | None,
        taps: Taps | None,
    ) -> None:
        """tree: how the tokens follow one another; None if they are a chain
        taps: takes hidden states between layers
        """
        device = model.device
        self.taps = taps
        self.uses = 0
        self._model = model
        self._weights = weights
        self._cache = cache
        self._finish = finish
        self._tree = tree
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._steps = torch.arange(size, device=device)
        self._replay: Run | None = None
        embedded = model.no_states().new_zeros(size, model.config.hidden)
        self._embedded = embedded if model.embeds_apart else None

    def take(self, tokens: torch.Tensor, position: int, rows: TreeRows | None) -> None:
        """Set the inputs."""
        count = tokens.shape[0]
        self._tokens[:count] = tokens
        if self._embedded is not None:
            self._embedded.copy_(self._model.embed(self._tokens))
        if rows is None:
            torch.add(self._steps, position, out=self._positions)
        else:
            self._positions[:count] = put(rows.positions, self._tokens.device)
            self._tree.take(rows)
        self._cache.begin()

    def run(self) -> torch.Tensor:
        """Return the result of all rows; a recorded forward returns the same tensor each time."""
        self.uses += 1
        return self._compute() if self._replay is None else self._replay()

    def record(self, recorder: Recorder) -> None:
        self._replay = recorder.record(self._compute)

    def _compute(self) -> torch.Tensor:
        batch = ForwardBatch(self._tokens, self._positions)
        if self._tree is not None:
            batch = replace(batch, drafted=self._tree.visible, lines=self._tree.lines)
        embedded = None if self._embedded is None else self._embedded.clone()
        hidden = self._model.forward(
            batch, self._weights, self._cache, embedded=embedded, taps=self.taps
        )
        return hidden if self._finish is None else self._finish(hidden)
