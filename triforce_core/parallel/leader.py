"""Rank 0, which starts the other ranks, sends them its calls and notices when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from triforce_core.decoding.contexts.calls import Finish
from triforce_core.parallel.collectives import Collectives, is_own
from triforce_core.parallel.exchanges import Exchanges
from triforce_core.parallel.message import DamagedMessageError, Failure, packed
from triforce_core.parallel.pulse import Pulse
from triforce_core.parallel.wire import Door, Gone, Wire
from triforce_core.parallel.world import (
    LEADER,
    LEADER_ADDRESS,
    LEADER_PROCESS,
    PULSE,
    START_SECONDS,
    THIS_MACHINE,
    World,
    store_on_this_machine,
)
from triforce_offload.errors import RankError, TriforceError, UsageError
from triforce_offload.ranks import Call

_INTERFACE = "GLOO_SOCKET_IFNAME"
# Seconds for a failed rank to report its error, after another rank lost its connection.
_EXPLAIN_SECONDS = 2.0
# Seconds after which a call that waits for a lost rank is assumed never to return.
_HUNG_SECONDS = 3.0
_END_SECONDS = 5.0


def lead(count: int) -> Leader:
    """Start the other ranks of `count` on this machine, or find those that `torchrun` started.

    Raises UsageError or RankError.
    """
    if dist.is_initialized():
        raise UsageError(
            "this process is in a torch.distributed group already; an engine of several ranks "
            "needs its own"
        )
    world = World.of_environment()
    try:
        return _start_all(count) if world is None else _find(world, count)
    except (RuntimeError, OSError) as error:
        raise RankError(f"the other ranks cannot be started or found: {error}") from error


def _find(world: World, count: int) -> Leader:
    """Return the leader of the ranks that torchrun started."""
    if world.rank:
        raise UsageError(
            f"this is rank {world.rank} of torchrun's, and rank 0 leads: call "
            "triforce_core.parallel.follower.main() here"
        )
    if count != world.ranks:
        raise UsageError(f"--gpus {count} does not go with the {world.ranks} ranks of torchrun")
    store = world.store()
    door = Door(world.host, everywhere=world.here < world.ranks)
    store.set(LEADER, door.address)
    return Leader(world, store, door, ())


def _start_all(count: int) -> Leader:
    store = store_on_this_machine(count)
    world = World(0, count, count, 0, THIS_MACHINE, store.port)
    door = Door(world.host)
    processes: list[subprocess.Popen] = []
    try:
        for rank in range(1, count):
            processes.append(_start(world, rank, door.address))
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return Leader(world, dist.PrefixStore(world.prefix, store), door, processes)


def _start(world: World, rank: int, address: str) -> subprocess.Popen:
    # The other ranks share this process's group and ignore its signals; they end when this one
    # ends.
    environment = {
        # Otherwise gloo looks up the host name of this machine, which may not resolve.
        _INTERFACE: "lo",
        **os.environ,
        **world.environment(rank),
        LEADER_PROCESS: str(os.getpid()),
        LEADER_ADDRESS: address,
    }
    return subprocess.Popen(
        # -P: do not import modules from the current directory.
        [sys.executable, "-P", "-m", "triforce_core.parallel"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


class Leader:
    """The Ranks interface of rank 0."""

    index = 0
    local = 0

    def __init__(
        self,
        world: World,
        store: dist.Store,
        door: Door,
        processes: Sequence[subprocess.Popen],
    ) -> None:
        """processes: the processes of the other ranks, if this one started them"""
        self.count = world.ranks
        self.here = world.here
        self._store = store
        self._processes = processes
        self._wires: dict[int, Wire] = {}
        self._pulses: dict[int, Pulse] = {}
        self._collectives: Collectives | None = None
        self._failures: list[tuple[int, Failure]] = []
        self._failed = threading.Event()
        self._last_resort: threading.Timer | None = None
        self._waiting = self._computing = False
        self._closed = threading.Event()
        self._exchanges = Exchanges()
        self._door = door

    def meet(self, device: torch.device, *, own_device: bool) -> None:
        """See Ranks.meet."""
        if self._collectives is not None:
            return
        with _on_this_machine() if self._processes else nullcontext(), self._guarded():
            self._collectives = Collectives(
                self._store, 0, self.count, device, own_device=own_device
            )

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """See Ranks.sum."""
        with self._guarded():
            return self._collectives.sum(part)

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """See Ranks.gather."""
        with self._guarded():
            return self._collectives.gather(part, widths)

    def least(self, number: int) -> int:
        """See Ranks.least."""
        with self._guarded():
            least = min(number, *(wire.receive() for wire in self._wires.values()))
            for wire in self._wires.values():
                wire.send(least)
            return least

    def of_first(self, message: Call) -> Call:
        """See Ranks.of_first."""
        with self._guarded():
            for wire in self._wires.values():
                wire.send(message)
        return message

    def tell(self, call: Call) -> None:
        """See Ranks.tell."""
        if not self._wires:
            self._let_in()
        message, following = packed(call)
        if call.settles:
            self._computing = False
        with self._guarded():
            for wire in self._wires.values():
                wire.send(message)
            for tokens in following:
                self._collectives.spread(tokens)
        if call.computes:
            self._computing = True

    def check(self) -> None:
        """See Ranks.check."""
        self._computing = False
        if self._failed.is_set():
            raise self._error()

    def ask(self, question: Call) -> list[Any]:
        """See Ranks.ask."""
        self.tell(question)
        with self._guarded():
            return [wire.receive() for wire in self._wires.values()]

    def collect(self, call: Call) -> list[torch.Tensor]:
        """See Ranks.collect."""

        def collect() -> list[torch.Tensor]:
            self.tell(call)
            with self._guarded():
                return [wire.receive_tensor() for wire in self._wires.values()]

        return self._exchange(collect)

    def hand(self, tensors: Sequence[torch.Tensor] | None) -> None:
        """See Ranks.hand."""
        given = tensors or [None] * len(self._wires)

        def hand() -> None:
            with self._guarded():
                for wire, tensor in zip(self._wires.values(), given, strict=True):
                    wire.send_tensor(tensor)

        self._exchange(hand)

    def close(self) -> None:
        """See Ranks.close."""
        if self._closed.is_set():
            return
        if not self._failed.is_set() and self._wires:
            try:
                self.tell(Finish())
            except RankError:
                self.abandon()
                return
        self._closed.set()
        self._door.close()
        for pulse in self._pulses.values():
            pulse.close()
        # All pulses have ended, so no other timer can start.
        if self._last_resort is not None:
            self._last_resort.cancel()
            self._last_resort.join()
        for wire in self._wires.values():
            wire.close()
        self._exchanges.close()
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

    def recover(self) -> None:
        """See Ranks.recover."""
        if self._computing or self._failed.is_set():
            self.abandon()

    def abandon(self) -> None:
        """See Ranks.abandon."""
        self._computing = False
        self._failed.set()
        self._kill()
        self.close()

    def _exchange(self, call: Callable[[], Any]) -> Any:
        """Run a call that an interrupt must not leave unfinished. Raises RankError."""
        if self._failed.is_set() or self._closed.is_set():
            raise self._error()
        return self._exchanges.run(call)

    def _let_in(self) -> None:
        """Wait until every rank has opened its wires."""
        wires: dict[int, Wire] = {}
        until = time.monotonic() + START_SECONDS
        while len(wires) + len(self._pulses) < 2 * (self.count - 1):
            if self._failures:
                raise self._error()
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    raise RankError(f"rank {rank} {_how_it_ended(process)} as it started")
            if time.monotonic() > until:
                raise RankError(f"not all {self.count} ranks came within {START_SECONDS} s")
            if visitor := self._door.open(_EXPLAIN_SECONDS):
                rank, purpose, wire = visitor
                if not 0 < rank < self.count:
                    wire.close()
                elif purpose == PULSE:
                    # Start the pulse now: the other rank already counts silent beats.
                    self._pulses[rank] = Pulse(wire, self._watch(rank))
                else:
                    wires[rank] = wire
        self._wires = dict(sorted(wires.items()))

    def _watch(self, rank: int) -> Callable[[Failure | None], None]:
        return lambda failure: self._lost(rank, failure)

    def _lost(self, rank: int, failure: Failure | None) -> None:
        """Handle the loss of a rank. Called in a pulse's thread."""
        if failure is None:
            failure = Failure("is gone", 1, first_hand=True)
            if self._processes:
                failure = failure._replace(message=_how_it_ended(self._processes[rank - 1]))
        self._failures.append((rank, failure))
        if not failure.first_hand:
            # Probably the consequence of another rank's failure: give that rank time to report it.
            self._closed.wait(_EXPLAIN_SECONDS)
        if self._failed.is_set() or self._closed.is_set():
            return
        self._failed.set()
        self._kill()
        for wire in self._wires.values():
            wire.cut()
        last_resort = threading.Timer(_HUNG_SECONDS, self._leave_if_hung)
        last_resort.daemon = True
        last_resort.start()
        self._last_resort = last_resort
        if self._collectives is not None:
            self._collectives.abort()

    def _leave_if_hung(self) -> None:
        """End the process if a call still waits for a lost rank, because it cannot be cancelled."""
        if self._waiting or self._computing:
            error = self._error()
            print(f"triforce: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _error(self) -> RankError:
        """Return the error of a lost rank, preferring one that failed itself.

        The caller has noticed the failure, so no computation counts as hung any more.
        """
        self._computing = False
        if not self._failures:
            return RankError("the ranks were ended after an error; an engine has to be made anew")
        first_hand = [known for known in self._failures if known[1].first_hand]
        rank, failure = (first_hand or self._failures)[0]
        return RankError(f"rank {rank}: {failure.message}", failure.exit_code)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn the errors that a lost rank causes in a call into the error of that rank."""
        if self._failed.is_set() or self._closed.is_set():
            raise self._error()
        self._waiting = True
        try:
            yield
        except DamagedMessageError:
            # The data after a damaged message cannot be interpreted.
            self.abandon()
            raise
        except TriforceError:
            raise
        except (RuntimeError, Gone) as error:
            if is_own(error):
                raise
            self._failed.wait(2 * _EXPLAIN_SECONDS)
            if not self._failures:
                self.abandon()
                raise RankError(f"ranks lost each other: {error}") from error
            raise self._error() from error
        except BaseException:
            # After an interrupt, a message may be half sent or half received.
            self.abandon()
            raise
        finally:
            self._waiting = False


@contextmanager
def _on_this_machine() -> Iterator[None]:
    """Make gloo use the loopback interface, as in the ranks that were started.

    The variable is reset afterwards, so that other groups of this process choose their interface.
    """
    before = os.environ.get(_INTERFACE)
    os.environ.setdefault(_INTERFACE, "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE]


def _how_it_ended(process: subprocess.Popen) -> str:
    try:
        code = process.wait(_EXPLAIN_SECONDS)
    except subprocess.TimeoutExpired:
        return "is gone"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
