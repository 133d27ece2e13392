"""What a user may set of an engine: the machine it runs on, how it decodes, what lives where.

Each default is written here and nowhere else: the command line takes its own from these classes.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from triforce_kernels.limits import FEW_ROWS
from triforce_offload.errors import UsageError
from triforce_offload.plan.placement import Placement
from triforce_offload.units import parse_bandwidth, parse_bytes

METHODS = ("triforce", "speculative", "autoregressive")
RETRIEVAL = ("mass", "mean")
ACCEPT = ("optimal", "coupled")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
AUTO, OFF = "auto", "off"
DENSE, STORED, SPLIT = "dense", "stored", "split"
WEIGHTS = (AUTO, STORED, DENSE, SPLIT)
KV_FORMATS = (AUTO, DENSE, SPLIT)
EXACT, INT4, INT8 = "exact", "int4", "int8"
DRAFT_WEIGHTS = (AUTO, EXACT, INT4, SPLIT)
DRAFT_KV = (AUTO, EXACT, INT8)
NGRAM, NO_DRAFTER = "ngram", "none"
DEFAULT_BUDGET = 4096
LEAST_BUDGET = 256
MOST_DRAFT_TOKENS = 256
# Threads for each processor, at most.
MOST_THREADS_EACH = 4
MOST_GPUS = 64
MOST_SEQUENCES = 16
# The longest draft that `auto` chooses: a pass verifies one token more.
AUTO_DRAFT_TOKENS = FEW_ROWS - 1


class UnknownFieldError(UsageError, TypeError):
    """A setting that there is not."""


@dataclass(frozen=True)
class MachineSettings:
    """The device, and the link to it. Raises UsageError for values that cannot be used.

    device: "cuda:0" or "cpu"; the first GPU, or else the CPU, if None
    device_memory: budget, in bytes or as "22GiB"; all that is free if None
    host_memory: most that may be used for what streams, in bytes or as "48GiB"; layers beyond it
        are read from their files in each pass; all that is free if None
    link_bandwidth: of the emulated link (CPU only), in bytes per second or as "25GB/s"; as fast as
        memory if None
    pin: whether host memory that streams is registered with the CUDA driver, for direct copies
    cuda_graphs: whether forwards that draft are recorded as CUDA graphs
    threads: of the CPU that compute, for all of the process; as PyTorch has them if None, and its
        part of them where ranks share a CPU
    gpus: that share the model, a rank each, every one of them with `device_memory`, a part of
        `host_memory` and a link of its own. More than one start on this machine, or are those that
        torchrun started; device is "cuda" then, "cuda:0" for ranks that share one, or "cpu"
    """

    device: str | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    link_bandwidth: float | None = None
    pin: bool = True
    cuda_graphs: bool = True
    threads: int | None = None
    gpus: int = 1

    def __post_init__(self) -> None:
        if self.device is not None:
            object.__setattr__(self, "device", str(self.device))
        for name in ("device_memory", "host_memory"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name)))
        if self.link_bandwidth is not None:
            object.__setattr__(self, "link_bandwidth", parse_bandwidth(self.link_bandwidth))
        if not _whole(self.gpus, 1, MOST_GPUS):
            raise UsageError(f"gpus must be 1 to {MOST_GPUS}, got {self.gpus!r}")
        most = MOST_THREADS_EACH * (os.cpu_count() or 1)
        if self.threads is not None and not _whole(self.threads, 1, most):
            raise UsageError(f"threads must be 1 to {most} on this machine, got {self.threads!r}")


@dataclass(frozen=True)
class MethodSettings:
    """How an engine decodes. Raises UsageError for values out of range.

    method: "triforce", "speculative" (the drafter straight to the target) or "autoregressive"
    draft: "auto" (n-grams), "ngram", "none", or the path or hub id of a small model with the same
        vocabulary
    draft_tokens: verified by a pass at most; "auto" chooses while running
    tree: tokens of a draft that branches, which the drafter proposes straight to the target; then
        draft_tokens is how deep it goes at most. "auto": such drafts are made where they were
        measured to be faster, if draft_tokens are "auto" too; "off": never
    inner_draft_tokens: of the drafter, verified by a step of the retrieval model
    budget: tokens of the retrieval cache; None takes 4096, or less where those do not fit
    chunk_size: tokens that are retrieved together, a power of two
    retrieval: "mass" or "mean", see `decoding/retrieval`
    draft_weights: what the retrieval model computes with. "auto": exact layers where they are on
        the device, copies in 4 bits of those that stream; "exact": there is no such level if one
        streams; "int4": copies of all; "split": layers by the high 8 bits of their split, which
        on a GPU is "auto" where weights are in such; there is no such level if these stream
    draft_kv: how the retrieval cache keeps its tokens: "exact", "int8" (whole numbers, with a scale
        for each channel of a head), or "auto": int8 on a GPU
    accept: "optimal", or "coupled" for a seed's text that depends on nothing but the seed
    """

    method: str = "triforce"
    draft: str | Path = AUTO
    draft_tokens: int | str = AUTO
    tree: int | str = AUTO
    inner_draft_tokens: int | str = AUTO
    budget: int | None = None
    chunk_size: int = 8
    retrieval: str = "mass"
    draft_weights: str = AUTO
    draft_kv: str = AUTO
    accept: str = "optimal"

    def __post_init__(self) -> None:
        for name, choices in (
            ("method", METHODS),
            ("retrieval", RETRIEVAL),
            ("accept", ACCEPT),
            ("draft_weights", DRAFT_WEIGHTS),
            ("draft_kv", DRAFT_KV),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} is not one of {', '.join(choices)}"
                )
        for name in ("draft_tokens", "inner_draft_tokens"):
            value = getattr(self, name)
            if value != AUTO and not _whole(value, 1, MOST_DRAFT_TOKENS):
                raise UsageError(f"{name} must be auto or 1 to {MOST_DRAFT_TOKENS}, got {value!r}")
        if self.tree not in (AUTO, OFF) and not _whole(self.tree, 2, MOST_DRAFT_TOKENS):
            raise UsageError(
                f"tree must be auto, off or 2 to {MOST_DRAFT_TOKENS}, got {self.tree!r}"
            )
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

    def without_effect(self, names: Iterable[str]) -> list[str]:
        """Which of some fields change nothing of how this method decodes."""
        unused = set()
        if not self.drafts:
            unused |= {"draft", "draft_tokens"}
        if not self.drafts or not self.has_drafter:
            unused |= {"tree"}
        if self.method != "triforce":
            unused |= {"inner_draft_tokens", "budget", "chunk_size", "retrieval"}
            unused |= {"draft_weights", "draft_kv"}
        elif not self.has_drafter:
            unused |= {"inner_draft_tokens"}
        return [name for name in names if name in unused]

    def check_weights(self, weights: str) -> None:
        """Raise UsageError if it drafts by the high bits of weights that are not split."""
        if self.draft_weights == SPLIT and weights != SPLIT:
            raise UsageError(
                "draft_weights split reads those of weights that are kept split: give weights "
                "split too"
            )

    def reads_high_bits(self, weights: str, *, on_gpu: bool) -> bool:
        """Whether the retrieval model reads layers that are on the device by their high bits
        alone. A CPU decodes longer than it reads.
        """
        auto = on_gpu and self.draft_weights == AUTO
        return weights == SPLIT and (auto or self.draft_weights == SPLIT)

    def rounds_kv(self, *, on_gpu: bool) -> bool:
        """Whether the retrieval cache keeps its tokens in 8 bits. A CPU takes longer to multiply
        with those than to read 16.
        """
        return self.draft_kv == INT8 or (on_gpu and self.draft_kv == AUTO)

    @property
    def scored_by(self) -> str:
        """What scores of chunks mean, and how large these are."""
        return f"{self.retrieval} {self.chunk_size}"

    @property
    def drafts(self) -> bool:
        return self.method != "autoregressive"

    @property
    def has_drafter(self) -> bool:
        """Whether something proposes below the retrieval model, or straight to the target."""
        return str(self.draft) != NO_DRAFTER

    @property
    def draft_model(self) -> str | Path | None:
        """The small model that drafts, if one does."""
        return None if str(self.draft) in (AUTO, NGRAM, NO_DRAFTER) else self.draft

    @property
    def fixed_draft_tokens(self) -> int | None:
        """Tokens of every draft for a pass; None if their number is learned."""
        return None if self.draft_tokens == AUTO else int(self.draft_tokens)

    @property
    def fixed_inner_draft_tokens(self) -> int | None:
        """Tokens of every draft for a step of the retrieval level; None if learned."""
        return None if self.inner_draft_tokens == AUTO else int(self.inner_draft_tokens)

    @property
    def fixed_tree(self) -> int | None:
        """Tokens of a tree that was asked for; None if trees are made where they are faster."""
        return int(self.tree) if isinstance(self.tree, int) else None

    @property
    def max_draft_tokens(self) -> int:
        """Tokens of the longest draft that a pass verifies."""
        if not self.drafts:
            return 0
        return max(self.fixed_draft_tokens or AUTO_DRAFT_TOKENS, self.fixed_tree or 0)

    @property
    def branches(self) -> bool:
        """Whether drafts of the lowest level may branch."""
        measured = self.tree == AUTO and self.draft_tokens == AUTO
        return self.drafts and self.has_drafter and (measured or isinstance(self.tree, int))

    @property
    def budgets(self) -> tuple[int, ...]:
        """Retrieval budgets to try, largest first."""
        if self.budget is not None:
            return (self.budget,)
        least = max(LEAST_BUDGET, 2 * self.chunk_size)
        halved = tuple(DEFAULT_BUDGET >> i for i in range(8) if DEFAULT_BUDGET >> i >= least)
        return halved or (least,)


@dataclass(frozen=True)
class EngineConfig:
    """Everything that may be set of an engine. Raises UsageError for values that cannot be used.

    machine, method: as their classes say
    dtype: of weights and KV: "auto", "float32", "bfloat16" or "float16"
    weights: "dense" (every number in dtype), "stored" (a GGUF file's blocks as they are), "split"
        (bfloat16 in 12 bits a number, the same to the last bit; float16 in two bytes), or "auto":
        as stored on a GPU, and on the emulated device where dense ones would stream; split of
        bfloat16 on a GPU where something would
    kv: "dense", "split" (blocks of bfloat16 in 12 bits, the same to the last bit), or "auto":
        split on a GPU where some KV would stream
    sequences: texts that passes may be over at once, each with its KV and what drafts for it; what
        streams of the weights crosses once for all of them
    max_context: prompt and new tokens that will be needed at most; the model's positions if None.
        What a longer context would take is used to keep weights and KV on the device
    block_tokens: tokens of a KV block, a power of two; chosen from the sizes if None
    placement: what is resident and what streams; weights first, then KV blocks, if None
    trace: a file for a timeline of each request, written when it ends, over the one before
    """

    machine: MachineSettings = field(default_factory=MachineSettings)
    method: MethodSettings = field(default_factory=MethodSettings)
    dtype: str = "auto"
    weights: str = AUTO
    kv: str = AUTO
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
            if value is not None and not _whole(value, 1):
                raise UsageError(f"{name} must be a positive whole number, got {value!r}")
        if self.block_tokens is not None and self.block_tokens & (self.block_tokens - 1):
            raise UsageError(f"block_tokens must be a power of two, got {self.block_tokens}")
        if self.dtype not in DTYPE_NAMES:
            raise UsageError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_NAMES)}")
        if self.weights not in WEIGHTS:
            raise UsageError(f"weights {self.weights!r} is not one of {', '.join(WEIGHTS)}")
        if self.kv not in KV_FORMATS:
            raise UsageError(f"kv {self.kv!r} is not one of {', '.join(KV_FORMATS)}")
        if not _whole(self.sequences, 1, MOST_SEQUENCES):
            raise UsageError(f"sequences must be 1 to {MOST_SEQUENCES}, got {self.sequences!r}")
        if self.sequences > 1 and self.machine.gpus > 1:
            raise UsageError("several sequences at once are not possible on several GPUs yet")
        self.method.check_weights(self.weights)
        if self.trace is not None:
            object.__setattr__(self, "trace", Path(self.trace))

    def changed(self, **values: Any) -> EngineConfig:
        """With other values of its fields, or of the machine's and the method's.

        Raises UnknownFieldError, which names the nearest field, or UsageError.
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
    close = difflib.get_close_matches(name, sorted(known), n=2, cutoff=0)
    return f"an engine has no setting {name!r}; the nearest are {close[0]!r} and {close[1]!r}"


def _require_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{name} of an EngineConfig must be a {kind.__name__}, got {value!r}")


def _whole(value: object, least: int, most: int | None = None) -> bool:
    return type(value) is int and value >= least and (most is None or value <= most)
