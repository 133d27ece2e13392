"""Which rank a process is, by the variables that `torchrun` sets. No torch."""

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

# Seconds that ranks have to import what they need and to find each other.
START_SECONDS = 120
_LOOK_SECONDS = 0.5
THIS_MACHINE = "127.0.0.1"
# What a rank's wires are for.
COMMANDS, PULSE = "commands", "pulse"
# In the store: where the rank that leads listens.
LEADER = "leader"
# In the environment, if the process that leads started this one: that, and where it listens.
LEADER_PROCESS, LEADER_ADDRESS = "TRIFORCE_LEADER", "TRIFORCE_LEADER_ADDRESS"


@dataclass(frozen=True)
class World:
    """The ranks of a run, and this process among them.

    here, local: how many of them are on this machine, and which of those this is
    host, port: of the store through which they find each other
    run: what tells this run's entries in the store from those of one that was started before it
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
        """None if nobody says that this process is one of several ranks. Raises UsageError."""
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
        """Through which the ranks find each other. Raises RuntimeError."""
        import torch.distributed as dist

        limit = timedelta(seconds=START_SECONDS)
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.ranks, timeout=limit))
        return dist.PrefixStore(self.prefix, store)

    @property
    def prefix(self) -> str:
        """Of what this run keeps in the store."""
        return f"triforce/{self.run}"

    def environment(self, rank: int) -> Mapping[str, str]:
        """The variables of another rank on this machine."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.here),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            # Of a `torchrun` that this process itself may be alone in.
            "TORCHELASTIC_RUN_ID": "",
            "TORCHELASTIC_RESTART_COUNT": "",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            # It would log pages about every connection that ends.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        }


def store_on_this_machine(ranks: int) -> dist.TCPStore:
    """A store that nobody reaches from another machine: by itself it would listen on all addresses,
    and it asks for no key. Raises OSError or RuntimeError.
    """
    import torch.distributed as dist

    door = socket.create_server((THIS_MACHINE, 0))
    return dist.TCPStore(
        THIS_MACHINE,
        door.getsockname()[1],
        ranks,
        is_master=True,
        wait_for_workers=False,
        # It closes it itself.
        master_listen_fd=door.detach(),
    )


def heed_the_leader() -> None:
    """Whoever means the command with a signal means the rank that leads, which tells the others. If
    that started this process and is gone, this one ends too, whatever it is doing.
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
