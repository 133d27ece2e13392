"""What a rank does that is told what to do: the same as the first one, to its own share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.link.waiting import come
from triforce_core.decoding.context import Context
from triforce_core.decoding.kv_parts import Interrupted
from triforce_core.decoding.models import Models
from triforce_core.parallel.message import Call, DamagedMessageError
from triforce_core.stats import rank_stats

Hear = Callable[[], Call]
# What a context is told to do by its methods' names. Nothing else is called.
_CALLS = (
    *("begin", "verify", "keep", "feed_one", "draft", "keep_drafted", "end", "layer_kv"),
    *("known_scores", "drop_retrieval", "lend", "close"),
)


@torch.inference_mode()
def serve(models: Models, hear: Hear, answer: Callable[[Any], None]) -> None:
    """Does everything that it hears of until the end. answer: to what the first rank asks.

    Raises what that raises.
    """
    context: FollowedContext | None = None
    trace = models.runtime.trace
    try:
        while (call := hear()).name != "finish":
            if call.name == "open":
                context = FollowedContext(models)
            elif call.name == "rank_stats":
                answer(rank_stats(models.runtime, context))
            elif call.name == "spans":
                answer((time.perf_counter(), trace.spans()))
            elif call.name == "clear":
                trace.clear()
            else:
                checksum, *arguments = call.arguments
                # After a fault the first rank may have another text, or none.
                if call.name != "close":
                    context.check(checksum)
                if call.name == "read":
                    _read(context, hear, *arguments)
                elif call.name == "restore_from":
                    _restore(context, *arguments)
                elif call.name not in _CALLS:
                    raise DamagedMessageError(f"there is no call {call.name!r}")
                else:
                    getattr(context, call.name)(*arguments)
                if call.name == "close":
                    context = None
    finally:
        if context is not None:
            context.close()


def _read(context: Context, hear: Hear, tokens: list[int], kept: int, new_tokens: int) -> None:
    def heard(layer: int) -> None:
        if hear().name != "go on":
            raise Interrupted

    try:
        context.read_from(tokens, kept, new_tokens, heard)
    except Interrupted:
        # What was kept before is kept, here as there.
        return


def _restore(context: Context, tokens: list[int], scored: bool) -> None:
    try:
        context.restore_from(tokens, scored, None)
    except Interrupted:
        # Nothing is kept, here as there.
        context.roll_back(0)


class FollowedContext(Context):
    """A context whose text is what was fed to it, whatever the first rank takes its own for."""

    def verify(self, tokens: torch.Tensor, parents: tuple[int, ...] | None = None) -> torch.Tensor:
        """Context.verify."""
        self._fed = tokens
        return super().verify(tokens, parents)

    def keep(self, rows: Sequence[int]) -> None:
        """Context.keep."""
        super().keep(rows)
        fed = come(self._fed).tolist()
        self.text.commit([fed[row] for row in rows])

    def feed_one(self, token: torch.Tensor, more: bool) -> torch.Tensor:
        """Context.feed_one."""
        logits = super().feed_one(token, more)
        self.text.commit(come(token).tolist())
        return logits
