"""What a user may set of an engine: the machine it runs on, and how it decodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import UsageError

if TYPE_CHECKING:
    import torch

METHODS = ("triforce", "speculative", "autoregressive")
RETRIEVAL = ("mass", "mean")
ACCEPT = ("optimal", "coupled")
AUTO = "auto"
DEFAULT_BUDGET = 4096
LEAST_BUDGET = 256
MOST_DRAFT_TOKENS = 256
AUTO_DRAFT_TOKENS = 64
"""Longest draft that `auto` chooses."""


@dataclass(frozen=True)
class MachineSettings:
    """device_memory: budget in bytes, None for all that is free
    link_bandwidth: of an emulated link, bytes per second; None for as fast as memory
    pin: whether host memory that streams is registered with the driver
    graphs: whether forwards that draft are recorded as CUDA graphs
    trace: whether a timeline is kept
    """

    device: torch.device
    device_memory: int | None = None
    link_bandwidth: float | None = None
    pin: bool = True
    graphs: bool = True
    trace: bool = False


@dataclass(frozen=True)
class MethodSettings:
    """Raises UsageError for values out of range.

    draft: "auto" (n-grams), "ngram", "none", or the path or hub id of a small model
    draft_tokens: verified by a pass at most; "auto" chooses while running
    inner_draft_tokens: of the drafter, verified by a step of the retrieval model
    budget: tokens of the retrieval cache; None takes 4096, or less where those do not fit
    chunk_size: tokens that are retrieved together
    retrieval: "mass" or "mean", see `retrieval`
    accept: "optimal" or "coupled", see `acceptance`
    """

    method: str = "triforce"
    draft: str | Path = AUTO
    draft_tokens: int | str = AUTO
    inner_draft_tokens: int | str = AUTO
    budget: int | None = None
    chunk_size: int = 8
    retrieval: str = "mass"
    accept: str = "optimal"

    def __post_init__(self) -> None:
        for name, choices in (
            ("method", METHODS),
            ("retrieval", RETRIEVAL),
            ("accept", ACCEPT),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} is not one of {', '.join(choices)}"
                )
        for name in ("draft_tokens", "inner_draft_tokens"):
            value = getattr(self, name)
            if value != AUTO and not _whole(value, 1, MOST_DRAFT_TOKENS):
                raise UsageError(f"{name} must be auto or 1 to {MOST_DRAFT_TOKENS}, got {value!r}")
        if not _whole(self.chunk_size, 1) or self.chunk_size & (self.chunk_size - 1):
            raise UsageError(f"chunk_size must be a power of two, got {self.chunk_size!r}")
        if self.budget is not None:
            least = 2 * self.chunk_size
            if not _whole(self.budget, least) or self.budget % self.chunk_size:
                raise UsageError(
                    f"budget must be a multiple of the chunk size {self.chunk_size}, and at least "
                    f"{least}, got {self.budget!r}"
                )
        if not isinstance(self.draft, (str, Path)) or not str(self.draft):
            raise UsageError(f"draft must be auto, ngram, none or a model, got {self.draft!r}")

    @property
    def drafts(self) -> bool:
        return self.method != "autoregressive"

    @property
    def draft_model(self) -> str | Path | None:
        """The small model that drafts, if one does."""
        return None if str(self.draft) in (AUTO, "ngram", "none") else self.draft

    @property
    def max_draft_tokens(self) -> int:
        """Of any pass."""
        if not self.drafts:
            return 0
        return AUTO_DRAFT_TOKENS if self.draft_tokens == AUTO else int(self.draft_tokens)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Retrieval budgets to try, largest first."""
        if self.budget is not None:
            return (self.budget,)
        least = max(LEAST_BUDGET, 2 * self.chunk_size)
        return tuple(DEFAULT_BUDGET >> i for i in range(8) if DEFAULT_BUDGET >> i >= least)


def _whole(value: object, least: int, most: int | None = None) -> bool:
    return type(value) is int and value >= least and (most is None or value <= most)
