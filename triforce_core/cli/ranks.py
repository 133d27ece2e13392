"""Command-line support for several GPUs, including ranks started by torchrun."""

from __future__ import annotations

from triforce_core.cli.terminal.output import say
from triforce_core.parallel.world import World, heed_the_leader
from triforce_core.settings import EngineConfig


def followed(*, quiet: bool) -> int | None:
    """Run a follower rank to its end if torchrun started this process as one.

    Return its exit code, or None for the leader and for a process without torchrun.
    """
    world = World.of_environment()
    if world is None or not world.rank:
        return None
    heed_the_leader()
    if not quiet:
        say(f"triforce: rank {world.rank} of {world.ranks}")
    from triforce_core.parallel.follower import main

    return main()


def of_world(config: EngineConfig) -> EngineConfig:
    """Return the config with one GPU for each rank of torchrun, unless it sets a number of GPUs."""
    world = World.of_environment()
    if world is None or config.machine.gpus > 1:
        return config
    return config.changed(gpus=world.ranks)
