"""A follower rank, which repeats the calls of rank 0."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import torch
import torch.distributed as dist

from triforce_core.decoding.contexts.calls import Finish, Load
from triforce_core.decoding.contexts.models import Models
from triforce_core.loading.load import load
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.parallel.collectives import Collectives, is_own
from triforce_core.parallel.message import DamagedMessageError, Failure, unpacked
from triforce_core.parallel.pulse import Pulse
from triforce_core.parallel.serving import serve
from triforce_core.parallel.start import opened_head
from triforce_core.parallel.wire import Gone, LostError, Wire, knock
from triforce_core.parallel.world import (
    COMMANDS,
    LEADER,
    LEADER_ADDRESS,
    LEADER_PROCESS,
    PULSE,
    World,
)
from triforce_offload.errors import CheckpointError, TriforceError
from triforce_offload.ranks import Call, Silent

# The exit code of a rank that ends because rank 0 ended.
_LED = 1


def main() -> int:
    """Follow rank 0 until it ends. Return the exit code."""
    world = World.of_environment()
    warnings.showwarning = lambda message, *_: _say(f"rank {world.rank}: {message}")
    started = LEADER_PROCESS in os.environ
    try:
        store = world.store()
        address = os.environ[LEADER_ADDRESS] if started else store.get(LEADER).decode()
        commands = knock(address, world.rank, COMMANDS)
        pulse = Pulse(knock(address, world.rank, PULSE), _leader_lost)
    except (RuntimeError, OSError, Gone) as error:
        if not started:
            _say(f"rank {world.rank} does not find rank 0: {str(error).splitlines()[0]}")
        # A rank 0 that started this process has ended with an error, and reports it itself.
        return _LED
    ranks = Follower(world, store, commands)
    try:
        ranks.follow()
    except Gone:
        return _LED
    except TriforceError as error:
        pulse.fail(Failure(str(error), error.exit_code, not isinstance(error, LostError)))
        return error.exit_code
    except BaseException as error:
        traceback.print_exc()
        pulse.fail(Failure(f"{type(error).__name__}: {error}", 1, first_hand=True))
        return 1
    pulse.close()
    return 0


def _leader_lost(failure: Failure | None) -> None:
    """Called in the pulse's thread, whatever the main thread waits for."""
    leader = os.environ.get(LEADER_PROCESS)
    if failure is not None:
        if os.environ["RANK"] == "1" or leader is None:
            _say(f"rank 0 {failure.message}")
        if leader is not None:
            # The leader is stopped or hangs, and nothing else would end the command.
            os.kill(int(leader), signal.SIGKILL)
    os._exit(_LED)


def _say(line: str) -> None:
    print(f"triforce: {line}", file=sys.stderr, flush=True)


class Follower(Silent):
    """The Ranks interface of a follower."""

    def __init__(self, world: World, store: dist.Store, commands: Wire) -> None:
        self.index = world.rank
        self.count = world.ranks
        self.here = world.here
        self.local = world.local
        self._store = store
        self._commands = commands
        self._collectives: Collectives | None = None
        self._device = torch.device("cpu")

    def follow(self) -> None:
        """Run the calls of rank 0 until it finishes. Raises their errors, or Gone."""
        call = self.hear()
        if isinstance(call, Finish):
            return
        if not isinstance(call, Load):
            raise DamagedMessageError(f"{type(call).__name__} came before Load")
        models = self._load(call)
        try:
            with models.runtime.memory.typed_errors(), models.runtime.memory.current():
                serve(models, self.hear, self._commands.send)
        finally:
            models.close()
        self._collectives.close()

    def meet(self, device: torch.device, *, own_device: bool) -> None:
        """See Ranks.meet."""
        if self._collectives is not None:
            return
        self._device = device
        with _noticed():
            self._collectives = Collectives(
                self._store, self.index, self.count, device, own_device=own_device
            )

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """See Ranks.sum."""
        with _noticed():
            return self._collectives.sum(part)

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """See Ranks.gather."""
        with _noticed():
            return self._collectives.gather(part, widths)

    def least(self, number: int) -> int:
        """See Ranks.least."""
        self._commands.send(number)
        return self._commands.receive()

    def of_first(self, message: Call) -> Call:
        """See Ranks.of_first."""
        found = self._commands.receive()
        if type(found) is not type(message):
            raise DamagedMessageError(f"{found!r} came in place of a {type(message).__name__}")
        return found

    def give(self, tensor: torch.Tensor) -> None:
        """See Ranks.give."""
        self._commands.send_tensor(tensor)

    def handed(self) -> torch.Tensor | None:
        """See Ranks.handed."""
        return self._commands.receive_tensor()

    def hear(self) -> Call:
        """Return the next call of rank 0. Raises RankError or Gone."""
        # A None in place of a tensor may arrive after this rank has stopped waiting for the tensor.
        while (call := self._commands.receive()) is None:
            pass
        if not isinstance(call, Call):
            raise DamagedMessageError(f"a {type(call).__name__} came where a call was expected")
        with _noticed():
            return unpacked(call, self._device, self._spread)

    def _spread(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._collectives.spread(tokens)

    def _load(self, call: Load) -> Models:
        with ExitStack() as files:
            checkpoint = files.enter_context(closing(open_checkpoint(call.path)))
            if checkpoint.fingerprint != call.fingerprint:
                raise CheckpointError(f"{call.path} holds another model than it does for rank 0")
            # Only rank 0 samples, so followers load no draft model: they draft with the target's
            # weights, and run their part of a drafter that ranks divide.
            drafter = opened_head(call, checkpoint)
            if drafter is not None:
                files.callback(drafter.close)
            return load(checkpoint, call.config, call.max_context, drafter, lambda *_: None, self)


@contextmanager
def _noticed() -> Iterator[None]:
    """Turn an error of a collective into LostError. Errors of this device itself pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        if is_own(error):
            raise
        raise LostError(f"lost the other ranks: {str(error).splitlines()[0]}") from error
