"""What the first of several ranks chooses by seconds, for all of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from triforce_core.model.sharing.share import Pieces
from triforce_core.plan.fitting import ProcessorShares
from triforce_core.plan.formats import split_weights
from triforce_core.plan.simulation.candidates import Candidate
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import AUTO
from triforce_offload.plan.placement import Placement
from triforce_offload.ranks import Call


@dataclass(frozen=True)
class Choice(Call):
    """Formats, a retrieval cache and what the processor computes, as the planner chose them.

    decided: whether the planner found a plan; if not, the other fields do not count, and each rank
        uses the rule by bytes
    seconds_per_token: predicted seconds
    split: `SPLIT` or `SPLIT_EXPERTS` if weights are split, else None
    in_blocks: whether quantised blocks are split, not numbers in bfloat16
    kv_split: whether KV is split
    budget: tokens of the retrieval cache, 0 for none
    draft_kv, copy_bits: see MethodSettings
    layers, kv, streamed, pools: see ProcessorShares
    """

    decided: bool = False
    seconds_per_token: float = 0.0
    split: str | None = None
    in_blocks: bool = False
    kv_split: bool = False
    budget: int = 0
    draft_kv: str = AUTO
    copy_bits: int | str = AUTO
    layers: float = 0.0
    kv: float = 0.0
    streamed: int = 0
    pools: Placement | None = None

    @classmethod
    def of(cls, best: Candidate) -> Choice:
        """Return what a plan chooses."""
        case, method, shares = best.case, best.plan.method, ProcessorShares.of(best.memory)
        return cls(
            decided=True,
            seconds_per_token=best.seconds_per_token,
            split=case.split,
            in_blocks=case.pieces is not None,
            kv_split=case.split_kv,
            budget=best.plan.budget,
            draft_kv=method.draft_kv,
            copy_bits=method.copy_bits,
            layers=float(shares.layers),
            kv=float(shares.kv),
            streamed=shares.streamed,
            pools=shares.pools,
        )

    @property
    def shares(self) -> ProcessorShares:
        """What the processor computes."""
        return ProcessorShares(self.layers, self.kv, self.streamed, self.pools)

    def sizes(self, sizes: ModelSizes, pieces: Pieces, unsplit: Collection[str]) -> ModelSizes:
        """Return a rank's sizes in the chosen formats, with the chosen kind of retrieval cache and
        bits of draft copies.

        pieces: of this rank's quantised matrices. unsplit: its matrices that cannot be split
        """
        layouts = sizes.layouts
        if self.split and not sizes.weights.split:
            own = pieces if self.in_blocks else None
            layouts = split_weights(self.split, sizes.config, sizes.dtype, unsplit, own)
        method = replace(sizes.method, draft_kv=self.draft_kv, copy_bits=self.copy_bits)
        return replace(sizes, layouts=layouts, kv_split=self.kv_split, method=method)
