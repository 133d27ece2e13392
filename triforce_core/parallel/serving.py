"""The main loop of a follower rank, which repeats the calls of rank 0 on its share of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from triforce_core.decoding.contexts import calls, snapshot
from triforce_core.decoding.contexts.context import Context, begin_pass, run_pass
from triforce_core.decoding.contexts.kv_parts import Interrupted
from triforce_core.decoding.contexts.models import Models
from triforce_core.decoding.decoder import PassInput
from triforce_core.parallel.message import DamagedMessageError
from triforce_core.requests.stats import rank_stats
from triforce_offload.errors import RankError
from triforce_offload.link.waiting import come
from triforce_offload.ranks import Call

Hear = Callable[[], Call]


@torch.inference_mode()
def serve(models: Models, hear: Hear, answer: Callable[[Any], None]) -> None:
    """Run every call that arrives, until Finish. answer: sends an answer to a question of rank 0

    Raises the errors of the calls, DamagedMessageError for a call that is out of place, or
    RankError if a context of this rank has other tokens than that of rank 0.
    """
    served: dict[int, _Served] = {}
    trace = models.runtime.trace
    try:
        while not isinstance(call := hear(), calls.Finish):
            match call:
                case calls.Open():
                    served[call.number] = _Served(Context(models, call.number), hear)
                case calls.Begin():
                    begin_pass([_found(served, number, call).context for number in call.contexts])
                case calls.Spans():
                    answer((time.perf_counter(), trace.spans()))
                case calls.ClearTrace():
                    trace.clear()
                case calls.RunPass():
                    _run([_found(served, part.context, call) for part in call.parts], call)
                case calls.RankStats():
                    context = _found(served, call.context, call).context
                    answer(rank_stats(models.runtime, context))
                case calls.Close():
                    _found(served, call.context, call).context.close()
                    del served[call.context]
                case calls.ContextCall():
                    _found(served, call.context, call).make(call)
                case _:
                    raise DamagedMessageError(f"{type(call).__name__} came where no rank sends it")
    finally:
        for each in served.values():
            each.context.close()


def _found(served: dict[int, _Served], number: int, call: Call) -> _Served:
    """Return the context with a number. Raises DamagedMessageError."""
    if number not in served:
        raise DamagedMessageError(f"{type(call).__name__} came before Open of context {number}")
    return served[number]


def _run(served: Sequence[_Served], call: calls.RunPass) -> None:
    """Run a pass over contexts. Raises RankError or LinkError."""
    for own, part in zip(served, call.parts, strict=True):
        own.check(part)
    tokens = call.tokens.split([part.count for part in call.parts])
    inputs = [
        PassInput(own, part.parents, part.is_kept, part.more)
        for own, part in zip(tokens, call.parts, strict=True)
    ]
    run_pass([own.context for own in served], inputs)
    for own, rows in zip(served, inputs, strict=True):
        own.ran(rows)


class _Served:
    """A follower's context.

    Its tokens are the ones that its own passes processed, so a checksum reveals a difference from
    rank 0.
    """

    def __init__(self, context: Context, hear: Hear) -> None:
        self.context = context
        self._hear = hear
        self._last_pass = torch.empty(0, dtype=torch.int64)

    def check(self, call: calls.ContextCall) -> None:
        """Check that rank 0's context has the same tokens. Raises RankError."""
        context, own = self.context, self.context.checksum
        if own != call.checksum:
            raise RankError(
                f"the first {context.length} tokens of its text have checksum {own:#010x}, and "
                f"those of rank 0 have {call.checksum:#010x}"
            )

    def make(self, call: calls.ContextCall) -> None:
        """Run one call. Raises RankError, DamagedMessageError, or the error of the call."""
        self.check(call)
        context = self.context
        match call:
            case calls.Prefill():
                self._prefill(call)
            case calls.Keep():
                context.keep(call.rows)
                self._commit(call.rows)
            case calls.Refresh():
                context.refresh(call.scored)
            case calls.Draft():
                context.levels.draft(call.tokens, call.parents)
            case calls.KeepDrafted():
                context.levels.keep_drafted(call.rows)
            case calls.RunHead():
                context.levels.run_head(call)
            case calls.End():
                context.end()
            case calls.Restore():
                self._restore(call)
            case calls.LayerKV():
                snapshot.layer_kv(context, call.layer)
            case calls.MarkPart():
                snapshot.mark_part(context, call.store, call.index, call.name)
            case calls.ChunkScores():
                snapshot.known_scores(context)
            case _:
                raise DamagedMessageError(f"{type(call).__name__} came where no rank sends it")

    def ran(self, rows: PassInput) -> None:
        """Note the tokens of a pass."""
        self._last_pass = rows.tokens
        if rows.is_kept:
            self._commit([0])

    def _commit(self, rows: list[int]) -> None:
        ran = come(self._last_pass).tolist()
        self.context.text.commit([ran[row] for row in rows])

    def _prefill(self, call: calls.Prefill) -> None:
        def heard(layer: int) -> None:
            if not isinstance(self._hear(), calls.GoOn):
                raise Interrupted

        try:
            self.context.prefill_from(call, heard)
        except Interrupted:
            # The reused prefix is kept, as on rank 0.
            return

    def _restore(self, call: calls.Restore) -> None:
        try:
            marks = {"window": call.windows, "state": call.states}
            snapshot.restore_from(self.context, call.tokens, call.scored, marks, None)
        except Interrupted:
            # Nothing is kept, as on rank 0.
            self.context.roll_back(0)
