"""Run many requests, as many at once as an engine has room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from triforce_core.params import SamplingParams
from triforce_core.requests.batch import Member, Receiver
from triforce_core.requests.stream import Completion, Piece


class Serving(Protocol):
    """The part of an engine that `run_all` needs."""

    has_room: bool

    def add_request(
        self, prompt: Any, params: Any, receive: Receiver, *, reuse: bool = True
    ) -> Member: ...

    def step(self) -> bool: ...

    def interrupt(self) -> None: ...

    def drop(self, member: Member) -> None: ...


def run_all(
    engine: Serving,
    requests: Iterable[tuple[str | Sequence[int], SamplingParams | None, Receiver]],
    goes_on: Callable[[], bool],
    *,
    reuse: bool = True,
) -> None:
    """Run requests to their ends, as many at once as there is room for.

    requests: prompt, parameters and receiver of each request
    goes_on: called before each pass; once it returns False, running requests are interrupted and
        no new one starts

    If an error is raised, all of them are dropped.
    """
    waiting, members, going = deque(requests), [], True
    try:
        while going or (waiting and goes_on()):
            while waiting and engine.has_room and goes_on():
                prompt, params, receive = waiting.popleft()
                members.append(engine.add_request(prompt, params, receive, reuse=reuse))
            if not goes_on():
                engine.interrupt()
            going = engine.step()
    finally:
        for member in members:
            if not member.ended:
                engine.drop(member)


def all_of(
    engine: Serving,
    prompts: Sequence[str | Sequence[int]],
    params: Sequence[SamplingParams | None],
    *,
    reuse: bool,
) -> list[Completion]:
    """Return the completions. Raises the first error; no request is running then."""
    results: dict[int, Piece | Completion | BaseException] = {}
    errors: list[BaseException] = []

    def receive(index: int, item: Piece | Completion | BaseException) -> None:
        results[index] = item
        if isinstance(item, BaseException):
            errors.append(item)

    run_all(
        engine,
        [
            (prompt, own, partial(receive, index))
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ],
        lambda: not errors,
        reuse=reuse,
    )
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(prompts))]
