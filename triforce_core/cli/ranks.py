"""Commands whose model several GPUs share, those among them that torchrun starts."""

from __future__ import annotations

from triforce_core.cli.terminal.output import say
from triforce_core.parallel.world import World, heed_the_leader
from triforce_core.settings import EngineConfig


def followed(*, quiet: bool) -> int | None:
    """Follows to the end, if torchrun started this process beside the rank that leads, and returns
    the exit code; else None, at once.
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
    """With as many GPUs as torchrun has started ranks, unless it says how many."""
    world = World.of_environment()
    if world is None or config.machine.gpus > 1:
        return config
    return config.changed(gpus=world.ranks)
