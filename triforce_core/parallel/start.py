"""Starting the ranks of an engine."""

from __future__ import annotations

from dataclasses import replace

from triforce_core.decoding.contexts.calls import Load
from triforce_core.model.checkpoints.checkpoint import Checkpoint
from triforce_core.model.checkpoints.drafters.found import head_at, open_head
from triforce_core.model.sharing.share import Share
from triforce_core.settings import EngineConfig
from triforce_offload.errors import CheckpointError
from triforce_offload.ranks import Alone, Ranks


def start_ranks(
    checkpoint: Checkpoint,
    config: EngineConfig,
    max_context: int,
    drafter: Checkpoint | None = None,
) -> Ranks:
    """Start the ranks of an engine and have each load its share of the checkpoint.

    max_context: the maximum length of a context, in tokens
    drafter: a draft model or a head in files of its own
    Raises UsageError or RankError.
    """
    gpus = config.machine.gpus
    if gpus == 1:
        return Alone()
    # Raise for a model that cannot be split between ranks.
    Share.of(checkpoint.config, 0, gpus)
    # Import this late: a single rank does not need torch.distributed.
    from triforce_core.parallel import leader

    ranks = leader.lead(gpus)
    try:
        path, fingerprint = checkpoint.path.absolute(), checkpoint.fingerprint
        load = Load(path, fingerprint, config, max_context)
        if drafter is not None and drafter.config.joins and drafter.config.joins.divided:
            own, fingerprint = drafter.path.absolute(), drafter.fingerprint
            load = replace(load, drafter=own, drafter_fingerprint=fingerprint)
        ranks.tell(load)
    except BaseException:
        ranks.abandon()
        raise
    return ranks


def opened_head(call: Load, checkpoint: Checkpoint) -> Checkpoint | None:
    """Open the drafter that ranks divide, if there is one. Raises CheckpointError."""
    path = call.drafter
    if path is None:
        return None
    head = open_head(path, head_at(path) or {}, checkpoint.config)
    if head.fingerprint != call.drafter_fingerprint:
        head.close()
        raise CheckpointError(f"{path} holds another drafter than it does for rank 0")
    return head
