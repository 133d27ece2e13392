"""Ranks that are threads of one process: what several compute, without starting processes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from helpers import BLOCK, placed

from triforce_core import Engine
from triforce_core.decoding.contexts.calls import Finish, Load
from triforce_core.loading.load import load
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.parallel.message import packed, unpacked
from triforce_core.parallel.serving import serve
from triforce_core.parallel.start import opened_head
from triforce_offload.errors import CheckpointError
from triforce_offload.plan.placement import Placement
from triforce_offload.ranks import Call, Silent

PATIENCE = 60.0


class _Meeting:
    """Where the ranks lay down what they bring, and wait for each other."""

    def __init__(self, count: int) -> None:
        # Of this exchange and of the one before, which nobody reads any more when the next begins.
        self._parts: list[list[Any]] = [[None] * count, [None] * count]
        self._brought = [0] * count
        self._aborted = False
        # What one of two ranks sent to the other.
        self._mail = {pair: queue.Queue() for pair in product(range(count), repeat=2)}

    def mail(self, of: int, to: int) -> queue.Queue[Any]:
        return self._mail[of, to]

    def exchange(self, index: int, part: Any) -> list[Any]:
        number = self._brought[index]
        parts = self._parts[number % 2]
        parts[index] = part
        self._brought[index] = number + 1
        until = time.monotonic() + PATIENCE
        while min(self._brought) <= number:
            # Faster than a lock: what others do takes less than waking this thread up.
            time.sleep(0)
            if self._aborted or time.monotonic() > until:
                raise RuntimeError("a rank is gone")
        return list(parts)

    def abort(self) -> None:
        self._aborted = True


class _Rank(Silent):
    """What a leader and a follower have in common of Ranks."""

    def __init__(self, index: int, count: int, meeting: _Meeting) -> None:
        self.index = index
        self.count = count
        self.sums = self.gathers = 0
        self._meeting = meeting

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        parts = self._together("sum", part.clone())
        assert {(it.shape, it.dtype) for it in parts} == {(part.shape, part.dtype)}
        return part.copy_(sum(parts[1:], parts[0]))

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        self.gathers += 1
        parts = self._together("gather", part.clone())
        assert [it.shape[1] for it in parts] == list(widths)
        return torch.cat(parts, 1) if self.index == 0 else part.new_empty(part.shape[0], 0)

    def least(self, number: int) -> int:
        return min(self._together("least", number))

    def of_first(self, message: Call) -> Call:
        return self._together("of_first", message)[0]

    def _together(self, kind: str, part: Any) -> list[Any]:
        """What all ranks bring, who must do the same."""
        kinds, parts = zip(*self._meeting.exchange(self.index, (kind, part)), strict=True)
        assert set(kinds) == {kind}
        return list(parts)

    def mail(self, of: int, to: int) -> queue.Queue[Any]:
        return self._meeting.mail(of, to)


class _Follower(_Rank):
    def __init__(self, index: int, count: int, meeting: _Meeting) -> None:
        super().__init__(index, count, meeting)
        self.heard: queue.Queue[Call] = queue.Queue()
        self.answers: queue.Queue[Any] = queue.Queue()
        self.error: BaseException | None = None

    def hear(self) -> Call:
        return unpacked(self.heard.get(timeout=PATIENCE), torch.device("cpu"), lambda it: it)

    def give(self, tensor: torch.Tensor) -> None:
        self.mail(self.index, 0).put(tensor.clone())

    def handed(self) -> torch.Tensor | None:
        return self.mail(0, self.index).get(timeout=PATIENCE)

    def answer(self) -> Any:
        while self.error is None:
            with suppress(queue.Empty):
                return self.answers.get(timeout=0.1)
        raise self.error

    def run(self, call: Load) -> None:
        try:
            with closing(open_checkpoint(call.path)) as checkpoint:
                if checkpoint.fingerprint != call.fingerprint:
                    raise CheckpointError("another model")
                drafter, settings = opened_head(call, checkpoint), (call.config, call.max_context)
                models = load(checkpoint, *settings, drafter, lambda *_: None, self)
            try:
                serve(models, lambda: self.hear(), self.answers.put)
            finally:
                models.close()
        except BaseException as error:
            self.error = error
            self._meeting.abort()


class ThreadLeader(_Rank):
    """Ranks, as the first one sees them. calls: everything that the others were told."""

    def __init__(self, count: int) -> None:
        meeting = _Meeting(count)
        super().__init__(0, count, meeting)
        self.followers = [_Follower(i, count, meeting) for i in range(1, count)]
        self.calls: list[type[Call]] = []
        self._threads: list[threading.Thread] = []

    def tell(self, call: Call) -> None:
        self.calls.append(type(call))
        if isinstance(call, Load):
            self._threads = [
                threading.Thread(target=it.run, args=(call,), daemon=True) for it in self.followers
            ]
            for thread in self._threads:
                thread.start()
            return
        message, following = packed(call)
        assert not following
        for follower in self.followers:
            follower.heard.put(message)

    def ask(self, question: Call) -> list[Any]:
        self.tell(question)
        return [it.answer() for it in self.followers]

    def collect(self, call: Call) -> list[torch.Tensor]:
        self.tell(call)
        return [self.mail(it.index, 0).get(timeout=PATIENCE) for it in self.followers]

    def hand(self, tensors: Sequence[torch.Tensor] | None) -> None:
        for follower, tensor in zip(
            self.followers, tensors or [None] * len(self.followers), strict=True
        ):
            self.mail(0, follower.index).put(None if tensor is None else tensor.clone())

    def close(self) -> None:
        self.tell(Finish())
        for thread in self._threads:
            thread.join(PATIENCE)
        for follower in self.followers:
            if follower.error is not None:
                raise follower.error

    def abandon(self) -> None:
        self._meeting.abort()


def engine(
    path: Path, gpus: int, placement: str | Placement = "resident", **options: object
) -> Engine:
    """With the ranks that a test has, threads or processes."""
    return Engine.from_pretrained(
        path,
        **{
            "device": "cpu",
            "max_context": 200,
            "block_tokens": BLOCK,
            "dtype": "float32",
            "gpus": gpus,
            **placed(placement, options),
        },
    )
