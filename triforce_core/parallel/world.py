"""Which rank a process is, by the variables that `torchrun` sets. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.errors import UsageError

if TYPE_CHECKING:
    import torch.distributed as dist

# What a rank's wires are for.
COMMANDS, PULSE = "commands", "pulse"
# In the store: where the rank that leads listens.
LEADER = "leader"
# In the environment: the process that leads, if it started this one.
LEADER_PROCESS = "TRIFORCE_LEADER"


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
        """None if nobody says that this process is a rank. Raises UsageError."""
        have = os.environ
        if "RANK" not in have or "WORLD_SIZE" not in have:
            return None
        ranks = _number("WORLD_SIZE")
        return cls(
            rank=_number("RANK"),
            ranks=ranks,
            here=_number("LOCAL_WORLD_SIZE", ranks),
            local=_number("LOCAL_RANK", _number("RANK")),
            host=have.get("MASTER_ADDR", "127.0.0.1"),
            port=_number("MASTER_PORT"),
            run="/".join(
                have.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")
            ),
        )

    def store(self) -> dist.Store:
        """Through which the ranks find each other. Raises RuntimeError."""
        import torch.distributed as dist

        store, _, _ = next(dist.rendezvous("env://", self.rank, self.ranks))
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
            # Of connections that end it writes pages.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        }


def _number(name: str, default: int | None = None) -> int:
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise UsageError(f"{name} is {value!r}, and a rank needs it as a number") from None
