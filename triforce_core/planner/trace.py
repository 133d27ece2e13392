"""The simulated timeline of rounds, in the format of a real run's trace."""

from __future__ import annotations

from offload.link.trace import HOST, Span
from offload.simulate import simulate, spans
from triforce_core.planner.candidates import Candidate

ROUNDS = 2


def trace_of(chosen: Candidate) -> list[Span]:
    """Two rounds, one after another. Every span says that it is simulated."""
    turn, told, start = chosen.round, [], 0.0
    copies, works, slots = turn.schedule()
    rate = chosen.case.hardware.stream_bytes_per_second
    timeline = simulate(copies, works, slots, rate, turn.refresh_seconds)
    drafted = turn.refresh_seconds + turn.draft_seconds
    for _ in range(ROUNDS):
        told += [
            span
            for span in spans(copies, works, timeline, start)
            if span.ended > span.began and span.name not in ("refresh", "draft")
        ]
        for name, began, ended in (
            ("refresh", 0.0, turn.refresh_seconds),
            ("draft", turn.refresh_seconds, drafted),
            ("verify", drafted, timeline.seconds),
        ):
            if ended > began:
                told.append(Span(HOST, name, start + began, start + ended, {"simulated": True}))
        start += timeline.seconds
    return told
