"""The calls that the first of several ranks sends to the others.

Each call is a frozen dataclass with its arguments. `CALLS` lists them all: `parallel/message` sends
and receives nothing else, and `parallel/serving` executes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from triforce_core.settings import EngineConfig
from triforce_offload.ranks import Call, Ranks


@dataclass(frozen=True)
class Load(Call):
    """Load a rank's share of the checkpoint at `path`, for contexts of `max_context` tokens.

    drafter: the same path of a drafter that ranks divide, and its fingerprint; None without one
    """

    path: Path
    fingerprint: str
    config: EngineConfig
    max_context: int
    drafter: Path | None = None
    drafter_fingerprint: str = ""


@dataclass(frozen=True)
class Finish(Call):
    """Stop serving: no call follows."""


@dataclass(frozen=True)
class Open(Call):
    """Create a context. number: identifies the context in later calls"""

    number: int


@dataclass(frozen=True)
class Begin(Call):
    """Start the copies of the next pass over contexts. contexts: their numbers, in their order"""

    contexts: list[int]


@dataclass(frozen=True)
class GoOn(Call):
    """Continue with the next layer of a prefill."""


@dataclass(frozen=True)
class Stop(Call):
    """Interrupt a prefill after this layer."""

    settles = True


@dataclass(frozen=True)
class Spans(Call):
    """Answer with this rank's clock and its timeline."""


@dataclass(frozen=True)
class ClearTrace(Call):
    """Forget the timeline so far."""


@dataclass(frozen=True)
class ContextCall(Call):
    """A call to a context.

    context: its number
    checksum: checksum of the tokens that the first rank's context has
    """

    context: int = field(default=0, kw_only=True)
    checksum: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class RankStats(ContextCall):
    """Answer with this rank's statistics of the request."""


@dataclass(frozen=True)
class Prefill(ContextCall):
    """Prefill a part of a prompt, see `Context.prefill_part`. After each layer, a `GoOn` or a
    `Stop` follows.

    tokens: the prompt up to the end of the part
    kept: number of tokens before the part
    new_tokens: the most tokens that will follow, without those of later parts
    idle: whether the retrieval level does not draft for this text, as the first rank decides
    before, after: see PromptPart
    """

    computes = True
    tokens: list[int]
    kept: int
    new_tokens: int
    idle: bool
    before: int
    after: int


@dataclass(frozen=True)
class PassRows(ContextCall):
    """A context's rows in a pass, see `decoder.PassInput`. count: number of rows"""

    count: int
    parents: tuple[int, ...] | None
    is_kept: bool
    more: bool


@dataclass(frozen=True)
class RunPass(Call):
    """Run a pass over rows of some contexts. tokens: those of all rows, context after context"""

    computes = True
    tokens: torch.Tensor
    parts: list[PassRows]


@dataclass(frozen=True)
class Keep(ContextCall):
    """Keep a path of the last pass's rows."""

    rows: list[int]


@dataclass(frozen=True)
class Refresh(ContextCall):
    """Choose the chunks of the retrieval cache. scored: see `Context.refresh`"""

    scored: int


@dataclass(frozen=True)
class Draft(ContextCall):
    """Run the retrieval level over some tokens. parents: see `DraftLevels.draft`"""

    computes = True
    tokens: torch.Tensor
    parents: tuple[int, ...] | None


@dataclass(frozen=True)
class KeepDrafted(ContextCall):
    """Keep a path of the retrieval level's last rows."""

    rows: list[int]


@dataclass(frozen=True)
class RunHead(ContextCall):
    """Run the head over some tokens. start, parents: see `DrafterOfStates.run`"""

    computes = True
    tokens: torch.Tensor
    start: tuple[int, ...] | None
    parents: tuple[int, ...] | None


@dataclass(frozen=True)
class End(ContextCall):
    """Drop a pass that was begun but not run."""

    settles = True


@dataclass(frozen=True)
class Restore(ContextCall):
    """Restore KV that the first rank sends.

    scored: whether the scores of chunks follow
    windows, states: lengths of the saved windows and states, which follow too
    """

    tokens: list[int]
    scored: bool
    windows: list[int]
    states: list[int]


@dataclass(frozen=True)
class LayerKV(ContextCall):
    """Send the KV of this rank's heads in a layer."""

    layer: int


@dataclass(frozen=True)
class MarkPart(ContextCall):
    """Send this rank's heads of a tensor of a mark.

    store: kind of the store
    index: index among the saved marks
    name: name of the tensor
    """

    store: str
    index: int
    name: str


@dataclass(frozen=True)
class ChunkScores(ContextCall):
    """Send the scores of all chunks for this rank's heads."""


@dataclass(frozen=True)
class Close(ContextCall):
    """Close the context."""


CALLS: tuple[type[Call], ...] = (
    *(Load, Finish, Open, Begin, GoOn, Stop, Spans, ClearTrace),
    *(Prefill, PassRows, RunPass, Keep, Refresh, Draft, KeepDrafted, RunHead, End, Restore),
    *(LayerKV, MarkPart, ChunkScores, RankStats, Close),
)


def silent(call: ContextCall) -> None:
    """Send a call to no rank."""


class Teller:
    """The sender of calls to a context. It does nothing on other ranks than the first."""

    def __init__(self, ranks: Ranks, number: int, checksum: Callable[[], int]) -> None:
        """number: the context's. checksum: returns the checksum of the tokens that it keeps"""
        self._ranks = ranks
        self._number = number
        self._checksum = checksum

    def __call__(self, call: ContextCall) -> None:
        """Send a call to the other ranks. Raises RankError."""
        if self._ranks.count > 1 and not self._ranks.index:
            self._ranks.tell(self.signed(call))

    def signed(self, call: ContextCall) -> ContextCall:
        """Return the call with the context's number and its current checksum."""
        return replace(call, context=self._number, checksum=self._checksum())

    def after_each_layer(self, then: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that calls `then`, then tells the other ranks whether to go on. So a
        prefill ends on all ranks or on none.
        """

        def told(layer: int) -> None:
            try:
                then(layer)
            except BaseException:
                self._ranks.tell(Stop())
                raise
            self._ranks.tell(GoOn())

        return told
