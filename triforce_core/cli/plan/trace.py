"""The simulated timeline of rounds, in the format of a real run's trace."""

from __future__ import annotations

from triforce_core.plan.simulation.candidates import Candidate
from triforce_offload.link.trace import HOST, Span
from triforce_offload.plan.simulate import spans

ROUNDS = 2


def trace_of(chosen: Candidate) -> list[Span]:
    """Return the spans of two consecutive rounds. Every span is marked as simulated."""
    cost, start = chosen.round, 0.0
    crossings, works, timeline = cost.executed
    drafted = cost.refresh_seconds + cost.draft_seconds
    shown: list[Span] = []
    for _ in range(ROUNDS):
        shown += [
            span
            for span in spans(crossings, works, timeline, start)
            if span.ended > span.began and span.name not in ("refresh", "draft")
        ]
        for name, began, ended in (
            ("refresh", 0.0, cost.refresh_seconds),
            ("draft", cost.refresh_seconds, drafted),
            ("verify", drafted, timeline.seconds),
        ):
            if ended > began:
                shown.append(Span(HOST, name, start + began, start + ended, {"simulated": True}))
        start += timeline.seconds
    return shown
