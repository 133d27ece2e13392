"""The rank of this process, from the variables that `torchrun` sets. This module needs no torch."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from triforce_offload.errors import UsageError

if TYPE_CHECKING:
    import torch.distributed as dist

# Seconds for ranks to import their modules and find each other.
START_SECONDS = 120
_LOOK_SECONDS = 0.5
THIS_MACHINE = "127.0.0.1"
# The purposes of a rank's two wires.
COMMANDS, PULSE = "commands", "pulse"
# The store's key for the address that rank 0 listens on.
LEADER = "leader"
# Environment variables of a rank that rank 0 started: the process id of rank 0, and the address it
# listens on.
LEADER_PROCESS, LEADER_ADDRESS = "TRIFORCE_LEADER", "TRIFORCE_LEADER_ADDRESS"


@dataclass(frozen=True)
class World:
    """The ranks of a run, and this process among them.

    here: the number of ranks on this machine
    local: the index of this rank among those on this machine
    host, port: the address of the store through which the ranks find each other
    run: separates the store's entries of this run from those of earlier runs
    """

    rank: int
    ranks: int
    here: int
    local: int
    host: str
    port: int
    run: str = "/"

    @classmethod
    def of_environment(cls) -> World | None:
        """Return the world of the environment's variables, or None for a process without other
        ranks.

        Raises UsageError.
        """
        have = os.environ
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= have.keys():
            return None
        if have["WORLD_SIZE"] == "1":
            return None
        ranks = _number("WORLD_SIZE")
        return cls(
            rank=_number("RANK"),
            ranks=ranks,
            here=_number("LOCAL_WORLD_SIZE", ranks),
            local=_number("LOCAL_RANK", _number("RANK")),
            host=have["MASTER_ADDR"],
            port=_number("MASTER_PORT"),
            run="/".join(
                have.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")
            ),
        )

    def store(self) -> dist.Store:
        """Return the store through which the ranks find each other. Raises RuntimeError."""
        import torch.distributed as dist

        limit = timedelta(seconds=START_SECONDS)
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.ranks, timeout=limit))
        return dist.PrefixStore(self.prefix, store)

    @property
    def prefix(self) -> str:
        """The prefix of this run's keys in the store."""
        return f"triforce/{self.run}"

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return the environment variables of another rank on this machine."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.here),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            # Clear the variables of a `torchrun` that started this process alone.
            "TORCHELASTIC_RUN_ID": "",
            "TORCHELASTIC_RESTART_COUNT": "",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            # Torch would log pages about every connection that ends.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        }


def store_on_this_machine(ranks: int) -> dist.TCPStore:
    """Return a store that other machines cannot reach.

    By default the store would listen on all addresses, and it requires no key. Raises OSError or
    RuntimeError.
    """
    import torch.distributed as dist

    door = socket.create_server((THIS_MACHINE, 0))
    return dist.TCPStore(
        THIS_MACHINE,
        door.getsockname()[1],
        ranks,
        is_master=True,
        wait_for_workers=False,
        # The store closes this descriptor itself.
        master_listen_fd=door.detach(),
    )


def heed_the_leader() -> None:
    """Ignore signals, and end this process when the leader that started it ends.

    Signals are meant for the whole command: rank 0 handles them and tells the other ranks.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leader = os.environ.get(LEADER_PROCESS)
    if leader is not None:
        threading.Thread(target=_outlive, args=(int(leader),), daemon=True).start()


def _outlive(leader: int) -> None:
    while os.getppid() == leader:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


def _number(name: str, default: int | None = None) -> int:
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise UsageError(f"{name} is {value!r}, and a rank needs it as a number") from None
