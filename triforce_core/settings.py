"""Settings of an engine: how it decodes, and where weights and KV are.

Defaults are defined only here; the command line takes its defaults from these classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from triforce_core.machine_settings import MachineSettings, is_whole
from triforce_kernels.limits import FEW_ROWS
from triforce_offload.errors import UsageError
from triforce_offload.plan.placement import Placement
from triforce_offload.units import parse_share

METHODS = ("triforce", "speculative", "autoregressive")
ACCEPT = ("optimal", "coupled")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
AUTO, ON, OFF = "auto", "on", "off"
DENSE, STORED, SPLIT, SPLIT_EXPERTS = "dense", "stored", "split", "split-experts"
WEIGHTS = (AUTO, STORED, DENSE, SPLIT, SPLIT_EXPERTS)
KV_FORMATS = (AUTO, DENSE, SPLIT)
SAME_BITS = (AUTO, ON, OFF)
EXACT, INT4, INT8 = "exact", "int4", "int8"
DRAFT_WEIGHTS = (AUTO, EXACT, INT4, SPLIT)
# Bits of a number of a draft copy. "auto" takes fewer where copies would not help otherwise.
_COPY_BITS, SMALLER_COPY_BITS = 4, 3
COPY_BITS = (AUTO, _COPY_BITS, SMALLER_COPY_BITS)
DRAFT_KV = (AUTO, EXACT, INT8)
NGRAM, MTP, NO_DRAFTER = "ngram", "mtp", "none"
# In `triforce plan` alone: an EAGLE-3 head, a DFlash drafter, or an assistant, of the usual shape.
EAGLE3, DFLASH, ASSISTANT = "eagle3", "dflash", "assistant"

DEFAULT_BUDGET = 4096
LEAST_BUDGET = 256
MOST_DRAFT_TOKENS = 256
MOST_SEQUENCES = 16
# The longest draft that `auto` chooses. A pass verifies one more token.
AUTO_DRAFT_TOKENS = FEW_ROWS - 1
# The largest tree of a retrieval level that `auto` chooses. Twice as many tokens are expected to
# add less than a tenth (`acceptance_curve.expected_tree`), and take twice the memory.
AUTO_TREE_TOKENS = 127


def of_usual_shape(draft: object) -> bool:
    """Return whether `draft` names a head of the usual shape: "eagle3", "dflash" or "assistant",
    the last two also with a quantisation mix: "dflash:MIX".
    """
    return draft == EAGLE3 or str(draft).partition(":")[0] in (DFLASH, ASSISTANT)


class UnknownFieldError(UsageError, TypeError):
    """A setting that does not exist."""


@dataclass(frozen=True)
class MethodSettings:
    """How an engine decodes. Raises UsageError for values out of range.

    method: "triforce", "speculative" (the drafter proposes directly to the target) or
        "autoregressive"
    draft: "auto" (the model's MTP head if it has one that fits and pays, else n-grams), "ngram",
        "mtp", "none", or the path or hub id of a draft model with the same vocabulary, of an
        EAGLE-3 head, of a DFlash drafter or of an assistant (Gemma 4)
    draft_tokens: number of draft tokens that a pass verifies at most; "auto" chooses it at run time
    tree: number of tokens of a tree draft for the target; `draft_tokens` then limits the depth of
        the tree. "auto" lets the retrieval level draft trees where something streams and `accept`
        is "coupled", and a drafter that proposes directly to the target where they were measured to
        be faster, both only if `draft_tokens` is "auto" too; "off" never drafts trees
    inner_draft_tokens: number of the drafter's tokens that a step of the retrieval level verifies
        at most; "auto" chooses it at run time
    budget: number of tokens of the retrieval cache; None takes 4096, or fewer if those do not fit
    chunk_size: number of tokens that are retrieved together, a power of two
    draft_weights: the weights that the retrieval level computes with. "auto": layers that are on
        the device (the high 8 bits of split layers on a GPU), and draft copies of layers that
        stream; "exact": exact layers, and no retrieval level if a layer streams; "int4": copies of
        all layers in 4 bits; "split": the high 8 bits of split layers, and no retrieval level if
        these stream
    copy_bits: bits of the numbers of copies of layers that stream, if `draft_weights` is "auto": 4,
        3, or "auto" (4; 3 where copies in 4 bits do not fit or save little, or where fewer bits
        were planned to be faster)
    draft_kv: how the retrieval cache stores its tokens: "exact", "int8" (integers, with a scale for
        each channel of a head), or "auto" (int8 on a GPU)
    accept: "optimal" for the highest acceptance rate, or "coupled" for output that depends on the
        seed but not on drafts
    """

    method: str = "triforce"
    draft: str | Path = AUTO
    draft_tokens: int | str = AUTO
    tree: int | str = AUTO
    inner_draft_tokens: int | str = AUTO
    budget: int | None = None
    chunk_size: int = 8
    draft_weights: str = AUTO
    copy_bits: int | str = AUTO
    draft_kv: str = AUTO
    accept: str = "optimal"

    def __post_init__(self) -> None:
        for name, choices in (
            ("method", METHODS),
            ("accept", ACCEPT),
            ("draft_weights", DRAFT_WEIGHTS),
            ("copy_bits", COPY_BITS),
            ("draft_kv", DRAFT_KV),
        ):
            _require_one_of(name, getattr(self, name), choices)
        if self.copy_bits != AUTO and type(self.copy_bits) is not int:
            raise UsageError(f"copy_bits must be auto, 4 or 3, got {self.copy_bits!r}")
        for name in ("draft_tokens", "inner_draft_tokens"):
            value = getattr(self, name)
            if value != AUTO and not is_whole(value, 1, MOST_DRAFT_TOKENS):
                raise UsageError(f"{name} must be auto or 1 to {MOST_DRAFT_TOKENS}, got {value!r}")
        if self.tree not in (AUTO, OFF) and not is_whole(self.tree, 2, MOST_DRAFT_TOKENS):
            raise UsageError(
                f"tree must be auto, off or 2 to {MOST_DRAFT_TOKENS}, got {self.tree!r}"
            )
        if not is_whole(self.chunk_size, 1) or self.chunk_size & (self.chunk_size - 1):
            raise UsageError(f"chunk_size must be a power of two, got {self.chunk_size!r}")
        if self.budget is not None:
            least = 2 * self.chunk_size
            if not is_whole(self.budget, least) or self.budget % self.chunk_size:
                raise UsageError(
                    f"budget must be a multiple of the chunk size {self.chunk_size}, and at least "
                    f"{least}, got {self.budget!r}"
                )
        if not isinstance(self.draft, (str, Path)) or not str(self.draft):
            raise UsageError(f"draft must be auto, ngram, mtp, none or a model, got {self.draft!r}")

    def without_effect(self, names: Iterable[str]) -> list[str]:
        """Return the fields among `names` that have no effect with this method."""
        unused = set()
        if not self.drafts:
            unused |= {"draft", "draft_tokens"}
        if not self.may_branch:
            unused |= {"tree"}
        if self.method != "triforce":
            unused |= {"inner_draft_tokens", "budget", "chunk_size", "draft_kv"}
            unused |= {"draft_weights", "copy_bits"}
        elif not self.has_drafter:
            unused |= {"inner_draft_tokens"}
        if self.draft_weights != AUTO:
            unused |= {"copy_bits"}
        return [name for name in names if name in unused]

    def check_weights(self, weights: str) -> None:
        """Raise UsageError if drafts need the high bits of weights that are not split."""
        if self.draft_weights == SPLIT and weights != SPLIT:
            raise UsageError(
                "draft_weights split reads those of weights that are kept split: give weights "
                "split too"
            )

    def reads_high_bits(self, weights: str, *, on_gpu: bool) -> bool:
        """Whether the retrieval level reads only the high bits of layers that are on the device.

        On a CPU, decoding takes longer than reading, so "auto" does not.
        """
        auto = on_gpu and self.draft_weights == AUTO
        return weights == SPLIT and (auto or self.draft_weights == SPLIT)

    def rounds_kv(self, *, on_gpu: bool) -> bool:
        """Whether the retrieval cache stores its tokens in 8 bits.

        A CPU takes longer to multiply 8-bit numbers than to read 16 bits, so "auto" does not.
        """
        return self.draft_kv == INT8 or (on_gpu and self.draft_kv == AUTO)

    @property
    def bits_of_copies(self) -> int:
        """Bits of the numbers of draft copies."""
        chosen = self.draft_weights == AUTO and self.copy_bits != AUTO
        return int(self.copy_bits) if chosen else _COPY_BITS

    @property
    def with_smaller_copies(self) -> MethodSettings | None:
        """These settings with draft copies in fewer bits; None if bits are not left to choose, or
        if no copies draft.
        """
        free = self.copy_bits == self.draft_weights == AUTO and self.method == "triforce"
        return replace(self, copy_bits=SMALLER_COPY_BITS) if free else None

    @property
    def scored_by(self) -> str:
        """What the scores are, and their chunk size, as saved with a context."""
        return f"mass {self.chunk_size}"

    @property
    def drafts(self) -> bool:
        return self.method != "autoregressive"

    @property
    def has_drafter(self) -> bool:
        """Whether there is a drafter below the retrieval level, or directly below the target."""
        return str(self.draft) != NO_DRAFTER

    @property
    def draft_model(self) -> str | Path | None:
        """The draft model; None if n-grams, an MTP head or nothing drafts."""
        return None if str(self.draft) in (AUTO, NGRAM, MTP, NO_DRAFTER) else self.draft

    @property
    def may_use_head(self) -> bool:
        """Whether the model's MTP head drafts, if it has one."""
        return self.drafts and str(self.draft) in (AUTO, MTP)

    @property
    def fixed_draft_tokens(self) -> int | None:
        """Number of tokens of every draft for a pass; None if it is learned."""
        return None if self.draft_tokens == AUTO else int(self.draft_tokens)

    @property
    def fixed_inner_draft_tokens(self) -> int | None:
        """Number of tokens of every draft for a retrieval level's step; None if it is learned."""
        return None if self.inner_draft_tokens == AUTO else int(self.inner_draft_tokens)

    @property
    def fixed_tree(self) -> int | None:
        """Number of tokens of a tree if one is required; None if `tree` is "auto" or "off"."""
        return int(self.tree) if isinstance(self.tree, int) else None

    def max_draft_tokens(self, *, retrieval_trees: bool = False) -> int:
        """Return the number of tokens of the longest draft that a pass verifies.

        retrieval_trees: whether a retrieval level drafts and may grow trees
        """
        if not self.drafts:
            return 0
        grows = retrieval_trees and self.grows_trees and self.fixed_tree is None
        auto = AUTO_TREE_TOKENS if grows else AUTO_DRAFT_TOKENS
        return max(self.fixed_draft_tokens or auto, self.fixed_tree or 0)

    @property
    def may_branch(self) -> bool:
        """Whether there is a level whose drafts could be trees."""
        return self.drafts and (self.has_drafter or self.method == "triforce")

    @property
    def grows_trees(self) -> bool:
        """Whether a retrieval level drafts trees. Unless they are asked for, it does so with
        coupled acceptance alone: with the other rule none were measured to gain.
        """
        return self.branches and (self.fixed_tree is not None or self.accept == "coupled")

    @property
    def branches(self) -> bool:
        """Whether drafts for the target may be trees."""
        measured = self.tree == AUTO and self.draft_tokens == AUTO
        return self.may_branch and (measured or isinstance(self.tree, int))

    @property
    def budgets(self) -> tuple[int, ...]:
        """Retrieval budgets to try, largest first."""
        if self.budget is not None:
            return (self.budget,)
        least = max(LEAST_BUDGET, 2 * self.chunk_size)
        return tuple(b for i in range(8) if (b := DEFAULT_BUDGET >> i) >= least) or (least,)


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine. Raises UsageError for values that cannot be used.

    machine: see MachineSettings
    method: see MethodSettings
    dtype: dtype of weights and KV: "auto", "float32", "bfloat16" or "float16"
    weights: how weights are kept. "dense": every number in `dtype`; "stored": in the blocks of a
        GGUF file, or in 16 bits where `dtype` is float32; "split": bfloat16 in 12 bits per number,
        without loss; "split-experts": the same of experts alone, of which each can be in host
        memory or cross the link by itself; "auto": quantised weights as stored on a GPU; on a
        CPU all weights as stored if its compiled kernels multiply by them, or if dense ones would
        stream; bfloat16 weights, or their experts, split on a GPU if weights or KV would
        stream; dense otherwise
    kv: how KV is kept: "dense", "split" (bfloat16 in 12 bits per number, without loss), or "auto"
        (split on a GPU if something would stream)
    same_bits: "on": each token has the same logits to the last bit, whatever drafts it, wherever
        weights and KV are, and whatever other sequences share its passes; "off": not; "auto": "on"
        where this costs little, which is on a CPU with compiled kernels
    host_compute: share of the layers and of the KV that would stream that the processor computes in
        passes, where they are; "auto": as much as makes a GPU's passes faster; "off" is 0
    sequences: number of sequences that a pass may run over at once, each with its own KV and draft
        levels; streamed weights cross the link once for all of them
    max_context: the most tokens of prompt and output together; None for the model's positions. A
        shorter context leaves more device memory for weights and KV
    block_tokens: number of tokens of a KV block, a power of two; None to choose it from the sizes
    placement: which weights and KV are resident and which stream; None to keep weights on the
        device first, then KV blocks
    trace: file for the timeline of a request; each request overwrites it when it ends
    """

    machine: MachineSettings = field(default_factory=MachineSettings)
    method: MethodSettings = field(default_factory=MethodSettings)
    dtype: str = "auto"
    weights: str = AUTO
    kv: str = AUTO
    same_bits: str = AUTO
    host_compute: float | str = AUTO
    sequences: int = 1
    max_context: int | None = None
    block_tokens: int | None = None
    placement: Placement | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        for name, kind in (("machine", MachineSettings), ("method", MethodSettings)):
            _require_kind(name, getattr(self, name), kind)
        if self.placement is not None:
            _require_kind("placement", self.placement, Placement)
        for name in ("max_context", "block_tokens"):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 1):
                raise UsageError(f"{name} must be a positive whole number, got {value!r}")
        if self.block_tokens is not None and self.block_tokens & (self.block_tokens - 1):
            raise UsageError(f"block_tokens must be a power of two, got {self.block_tokens}")
        _require_one_of("dtype", self.dtype, DTYPE_NAMES)
        _require_one_of("weights", self.weights, WEIGHTS)
        _require_one_of("kv", self.kv, KV_FORMATS)
        _require_one_of("same_bits", self.same_bits, SAME_BITS)
        if (share := self.host_compute) != AUTO:
            object.__setattr__(self, "host_compute", parse_share("host_compute", share))
        if not is_whole(self.sequences, 1, MOST_SEQUENCES):
            raise UsageError(f"sequences must be 1 to {MOST_SEQUENCES}, got {self.sequences!r}")
        self.method.check_weights(self.weights)
        if self.trace is not None:
            object.__setattr__(self, "trace", Path(self.trace))

    @property
    def uses_processor(self) -> bool:
        """Whether the processor was asked to compute parts of passes."""
        placed = self.placement is not None and self.placement.uses_processor
        return placed if self.host_compute == AUTO else self.host_compute > 0

    def changed(self, **values: Any) -> EngineConfig:
        """Return a copy with other values for its own fields, or those of `machine` and `method`.

        Raises UnknownFieldError, which names the nearest fields, or UsageError.
        """
        own, machine, method = {}, {}, {}
        for name, value in values.items():
            if name == "method" and not isinstance(value, MethodSettings):
                method[name] = value
            elif name in _names(EngineConfig):
                own[name] = value
            elif name in _names(MachineSettings):
                machine[name] = value
            elif name in _names(MethodSettings):
                method[name] = value
            else:
                raise UnknownFieldError(_unknown(name))
        config = replace(self, **own)
        return replace(
            config,
            machine=replace(config.machine, **machine),
            method=replace(config.method, **method),
        )


def _names(settings: type) -> list[str]:
    return [field.name for field in fields(settings)]


def _unknown(name: str) -> str:
    known = {n for c in (EngineConfig, MachineSettings, MethodSettings) for n in _names(c)}
    first, second = nearest_names(name, sorted(known))
    return f"an engine has no setting {name!r}; the nearest are {first!r} and {second!r}"


def nearest_names(name: str, known: Sequence[str]) -> list[str]:
    """Return the two known names that are most alike to a name."""
    return difflib.get_close_matches(name, known, n=2, cutoff=0)


def _require_one_of(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise UsageError(f"{name} {value!r} is not one of {', '.join(map(str, choices))}")


def _require_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{name} of an EngineConfig must be a {kind.__name__}, got {value!r}")
