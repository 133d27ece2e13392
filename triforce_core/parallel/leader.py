"""The rank that leads: starts the others, tells them what it does, notices when one fails."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from offload.errors import RankError, TriforceError, UsageError
from triforce_core.parallel.collectives import Collectives
from triforce_core.parallel.message import packed
from triforce_core.parallel.pulse import Failure, Pulse
from triforce_core.parallel.wire import Door, Gone, Wire
from triforce_core.parallel.world import COMMANDS, LEADER, LEADER_PROCESS, PULSE, World

_Result = TypeVar("_Result")

# Seconds that the others have to import what they need.
_START_SECONDS = 120.0
# Seconds in which a rank that met an error says so, if another one has only lost its connection.
_EXPLAIN_SECONDS = 2.0
# Seconds after which a call that waits for a rank that is lost will not return.
_HUNG_SECONDS = 3.0
_END_SECONDS = 5.0


def lead(count: int) -> Leader:
    """Starts the other ranks of `count` on this machine, or finds those that `torchrun` started.

    Raises UsageError or RankError.
    """
    world = World.of_environment()
    if world is None:
        store = dist.TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
        world = World(0, count, count, 0, "127.0.0.1", store.port)
        # It would ask for this machine's name otherwise, which may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        processes = [_start(world, rank) for rank in range(1, count)]
        return Leader(world, dist.PrefixStore(world.prefix, store), processes)
    if count not in (1, world.ranks):
        raise UsageError(f"--gpus {count} does not go with the {world.ranks} ranks of torchrun")
    return Leader(world, world.store(), ())


def _start(world: World, rank: int) -> subprocess.Popen:
    # Whoever ends this process ends the others by that: they share its group, and heed it alone.
    environment = os.environ | world.environment(rank) | {LEADER_PROCESS: str(os.getpid())}
    return subprocess.Popen(
        # Nothing in the current directory is taken for a module.
        [sys.executable, "-P", "-m", "triforce_core.parallel"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


class Leader:
    """Ranks, as the first one sees them."""

    index = 0
    local = 0

    def __init__(
        self, world: World, store: dist.Store, processes: Sequence[subprocess.Popen]
    ) -> None:
        """processes: of the other ranks, if this one started them. Raises RankError."""
        self.count = world.ranks
        self.here = world.here
        self._store = store
        self._processes = processes
        self._wires: dict[int, Wire] = {}
        self._pulses: dict[int, Pulse] = {}
        self._collectives: Collectives | None = None
        self._failures: list[tuple[int, Failure]] = []
        self._failed = threading.Event()
        self._waiting = False
        self._closed = False
        self._door: Door | None = None
        try:
            self._door = Door(world.host)
            store.set(LEADER, pickle.dumps(self._door.address))
        except BaseException:
            self.abandon()
            raise

    def meet(self, device: torch.device, *, own_device: bool) -> None:
        """Ranks.meet."""
        self._collectives = self._guarded(
            lambda: Collectives(self._store, 0, self.count, device, own_device=own_device)
        )

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Ranks.sum."""
        return self._guarded(lambda: self._collectives.sum(part))

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Ranks.gather."""
        return self._guarded(lambda: self._collectives.gather(part, widths))

    def least(self, number: int) -> int:
        """Ranks.least."""

        def agree() -> int:
            least = min(number, *(wire.receive() for wire in self._wires.values()))
            for wire in self._wires.values():
                wire.send(least)
            return least

        return self._guarded(agree)

    def tell(self, call: str, *arguments: Any) -> None:
        """Ranks.tell."""
        if not self._wires:
            self._let_in()
        message, following = packed(call, arguments)

        def send() -> None:
            for wire in self._wires.values():
                wire.send(message)
            for tokens in following:
                self._collectives.spread(tokens)

        self._guarded(send)

    def ask(self, question: str) -> list[Any]:
        """Ranks.ask."""
        self.tell(question)
        return self._guarded(lambda: [wire.receive() for wire in self._wires.values()])

    def close(self) -> None:
        """Ranks.close."""
        if self._closed:
            return
        if not self._failed.is_set() and self._wires:
            try:
                self.tell("finish")
            except RankError:
                self.abandon()
                return
        self._closed = True
        if self._door is not None:
            self._door.close()
        for pulse in self._pulses.values():
            pulse.close()
        for wire in self._wires.values():
            wire.close()
        if self._collectives is not None:
            if self._failed.is_set():
                self._collectives.abort()
            self._collectives.close()
        until = time.monotonic() + (_END_SECONDS if self._wires else 0)
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def abandon(self) -> None:
        """Ranks.abandon."""
        self._failed.set()
        self._kill()
        self.close()

    def _let_in(self) -> None:
        """Waits until every rank has opened its wires."""
        wires: dict[tuple[int, str], Wire] = {}
        until = time.monotonic() + _START_SECONDS
        while len(wires) < 2 * (self.count - 1):
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    raise RankError(f"rank {rank} {_how_it_ended(process)} as it started")
            if time.monotonic() > until:
                raise RankError(f"not all {self.count} ranks came within {_START_SECONDS:g} s")
            if visitor := self._door.open(_EXPLAIN_SECONDS):
                rank, purpose, wire = visitor
                wires[rank, purpose] = wire
        ranks = range(1, self.count)
        self._wires = {rank: wires[rank, COMMANDS] for rank in ranks}
        self._pulses = {rank: Pulse(wires[rank, PULSE], self._watch(rank)) for rank in ranks}

    def _watch(self, rank: int) -> Callable[[Failure | None], None]:
        return lambda failure: self._lost(rank, failure)

    def _lost(self, rank: int, failure: Failure | None) -> None:
        """Called in a pulse's thread."""
        if failure is None:
            failure = Failure("is gone", 1, first_hand=True)
            if self._processes:
                failure = failure._replace(message=_how_it_ended(self._processes[rank - 1]))
        self._failures.append((rank, failure))
        if not failure.first_hand:
            # Somebody else's failure, most likely; that one will say so.
            time.sleep(_EXPLAIN_SECONDS)
        if self._failed.is_set() or self._closed:
            return
        self._failed.set()
        self._kill()
        for wire in self._wires.values():
            wire.cut()
        if self._collectives is not None:
            self._collectives.abort()
        time.sleep(_HUNG_SECONDS)
        if self._waiting:
            # What it waits for will not come.
            print(f"triforce: {self._error()}", file=sys.stderr, flush=True)
            os._exit(self._error().exit_code)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _error(self) -> RankError:
        """What a rank that was lost died of."""
        if not self._failures:
            return RankError("the ranks were ended after an error; an engine has to be made anew")
        first_hand = [known for known in self._failures if known[1].first_hand]
        rank, failure = (first_hand or self._failures)[0]
        return RankError(f"rank {rank}: {failure.message}", failure.exit_code)

    def _guarded(self, run: Callable[[], _Result]) -> _Result:
        """Turns what the loss of a rank does to a call into what that rank died of."""
        if self._failed.is_set() or self._closed:
            raise self._error()
        self._waiting = True
        try:
            return run()
        except TriforceError:
            raise
        except (RuntimeError, Gone) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self._failed.wait(2 * _EXPLAIN_SECONDS)
            if not self._failures:
                raise RankError(f"ranks lost each other: {error}") from error
            raise self._error() from error
        finally:
            self._waiting = False


def _how_it_ended(process: subprocess.Popen) -> str:
    try:
        code = process.wait(_EXPLAIN_SECONDS)
    except subprocess.TimeoutExpired:
        return "is gone"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
