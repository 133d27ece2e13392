"""A model that is wholly on the device: its forwards over a few tokens, recorded where they can be.

What drafts runs many short forwards, and on a GPU launching their kernels one by one takes longer
than running them. So a forward of each size is recorded as a CUDA graph when it has been used a few
times, and replayed from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from offload.graphs import Recorder, Run
from offload.kv.dense import DenseKV
from offload.link.trace import Tracer
from offload.weights import ResidentWeights
from triforce_core.model.llama import Model
from triforce_core.sizing.drafting import LONGEST_RECORDED

USES_BEFORE = 2
"""Of a size, run as they will be recorded: libraries set themselves up at their first use."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states [n, hidden] to what is wanted of them, [n, vocab]."""


def padded(tokens: int) -> int:
    """The size of the recorded forward that takes `tokens` tokens, a power of two."""
    return 1 << (tokens - 1).bit_length()


class ResidentModel:
    """Forwards of a model over a DenseKV.

    Eager and recorded forwards compute the same, up to rounding.
    """

    def __init__(
        self,
        model: Model,
        weights: ResidentWeights,
        kv: DenseKV,
        head: Head,
        recorder: Recorder | None,
        trace: Tracer,
        name: str,
    ) -> None:
        """recorder: None to run everything eagerly. name: what a trace calls its forwards."""
        self._model = model
        self._weights = weights
        self._kv = kv
        self._head = head
        self._recorder = recorder if model.recordable else None
        self._trace = trace
        self._name = name
        self._forwards: dict[int, _FixedForward] = {}

    def run(self, tokens: torch.Tensor, position: int, *, last: bool = False) -> torch.Tensor:
        """Feeds tokens [n], the first at `position`, behind the end of the KV; its end stays.

        Returns the head's result for each of them, [n, vocab], or of the last alone, [1, vocab].
        """
        with self._trace.compute(self._name, tokens=tokens.shape[0]):
            return self._run(tokens, position, last)

    def close(self) -> None:
        """Lets go of what was recorded, and with it of its memory."""
        self._forwards.clear()

    def _run(self, tokens: torch.Tensor, position: int, last: bool) -> torch.Tensor:
        count = tokens.shape[0]
        size = padded(count)
        if self._recorder and size <= LONGEST_RECORDED and self._kv.end + size <= self._kv.capacity:
            forward = self._forwards.get(size)
            if forward is None:
                forward = self._forwards[size] = _FixedForward(
                    self._model, self._weights, self._kv, self._head, size, tokens.device
                )
            forward.take(tokens, position)
            if forward.uses == USES_BEFORE:
                self._record(forward, size)
            out = forward.run()[:count]
            return out[-1:] if last else out
        hidden = self._model.forward(tokens, position, self._weights, self._kv)
        return self._head(hidden[-1:] if last else hidden)

    def _record(self, forward: _FixedForward, size: int) -> None:
        try:
            forward.record(self._recorder)
        except RuntimeError as error:
            # Every use so far ran kernel by kernel; it is only slower.
            warnings.warn(
                f"{self._name}: forwards of {size} tokens are launched kernel by kernel, since "
                f"recording them failed: {str(error).splitlines()[0]}",
                RuntimeWarning,
                stacklevel=2,
            )


class _FixedForward:
    """A forward of exactly `size` tokens, whose inputs lie at fixed addresses.

    Tokens that pad it follow the real ones, which therefore do not see them; what they leave in the
    KV lies behind its end.
    """

    def __init__(
        self,
        model: Model,
        weights: ResidentWeights,
        kv: DenseKV,
        head: Head,
        size: int,
        device: torch.device,
    ) -> None:
        self.uses = 0
        self._model = model
        self._weights = weights
        self._kv = kv
        self._head = head
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._end = torch.zeros(1, dtype=torch.int64, device=device)
        self._replay: Run | None = None

    def take(self, tokens: torch.Tensor, position: int) -> None:
        """Sets the inputs."""
        self._tokens[: tokens.shape[0]] = tokens
        self._position.fill_(position)
        self._end.fill_(self._kv.end)

    def run(self) -> torch.Tensor:
        """[size, vocab], a tensor of the caller's own."""
        self.uses += 1
        if self._replay is None:
            return self._compute()
        return self._replay().clone()  # the next replay writes over it

    def record(self, recorder: Recorder) -> None:
        self._replay = recorder.record(self._compute)

    def _compute(self) -> torch.Tensor:
        cache = self._kv.fixed(self._end)
        return self._head(self._model.forward(self._tokens, self._position, self._weights, cache))
