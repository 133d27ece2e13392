"""The ranks of an engine, started if there are to be several."""

from __future__ import annotations

from triforce_core.decoding.contexts.calls import Load
from triforce_core.model.checkpoints.checkpoint import Checkpoint
from triforce_core.model.share import Share
from triforce_core.settings import EngineConfig
from triforce_offload.ranks import Alone, Ranks


def start_ranks(checkpoint: Checkpoint, config: EngineConfig, max_context: int) -> Ranks:
    """Has the others load their shares of a checkpoint. max_context: tokens of the longest text.

    Raises UsageError or RankError.
    """
    gpus = config.machine.gpus
    if gpus == 1:
        return Alone()
    # Refuses a model that does not spread.
    Share.of(checkpoint.config, 0, gpus)
    # Only who has several ranks needs torch.distributed.
    from triforce_core.parallel import leader

    ranks = leader.lead(gpus)
    try:
        path, fingerprint = checkpoint.path.absolute(), checkpoint.fingerprint
        ranks.tell(Load(path, fingerprint, config, max_context))
    except BaseException:
        ranks.abandon()
        raise
    return ranks
