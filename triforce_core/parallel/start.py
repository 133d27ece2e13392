"""Starting the ranks of an engine."""

from __future__ import annotations

from triforce_core.decoding.contexts.calls import Load
from triforce_core.model.checkpoints.checkpoint import Checkpoint
from triforce_core.model.sharing.share import Share
from triforce_core.settings import EngineConfig
from triforce_offload.ranks import Alone, Ranks


def start_ranks(checkpoint: Checkpoint, config: EngineConfig, max_context: int) -> Ranks:
    """Start the ranks of an engine and have each load its share of the checkpoint.

    max_context: the maximum length of a context, in tokens
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
        ranks.tell(Load(path, fingerprint, config, max_context))
    except BaseException:
        ranks.abandon()
        raise
    return ranks
