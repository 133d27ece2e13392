"""From a checkpoint on disk to a model on the device, refusing before loading what will not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from offload.cuda import CudaLink
from offload.dense import dense_bytes
from offload.device import DeviceMemory
from offload.emulated import EmulatedLink
from offload.errors import DoesNotFitError, UsageError
from offload.gather import reader_bytes
from offload.graphs import CudaRecorder
from offload.host import CudaDriver, HostMemory
from offload.kv import KVShape
from offload.layout import FlatLayout
from offload.link import Link
from offload.numa import cpus_near
from offload.placement import (
    Demand,
    Placement,
    check_host,
    check_placement,
    least_bytes,
    place,
)
from offload.runtime import Runtime
from offload.staging import StagedLink
from offload.trace import NoTrace, Trace, TracedLink, Tracer
from offload.weights import WeightStore

from .checkpoint import Checkpoint
from .config import ModelConfig
from .drafting import Drafting, SmallModel, small_model_capacity, small_model_shape
from .model import Ends, Model, layer_shapes
from .resident import LONGEST
from .retrieval import fitting_budget, retrieval_bytes
from .rope import Rope
from .settings import MachineSettings, MethodSettings
from .workspace import graph_bytes, law_bytes, pass_bytes, workspace_bytes

PREFILL_CHUNK = 1024
_BLOCK_TOKENS = (16, 4096)
_BLOCK_BYTES = EmulatedLink.copy_bytes
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[str, int, int], None]
"""Called with what is under way, how much of it is done, and how much there is."""


def open_device(name: str | torch.device | None) -> torch.device:
    """The device asked for, or the first GPU, or the CPU. Raises UsageError."""
    if name is None:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {name!r} is not known; use cuda:0 or cpu") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UsageError(f"device {name!r} is not supported; use cuda:0 or cpu")
    count = torch.cuda.device_count()
    device = torch.device("cuda", device.index or 0)
    if device.index >= count:
        raise UsageError(f"device {name!r} is not there; CUDA finds {count} GPUs")
    torch.cuda.set_device(device)  # memory is registered, and streams made, for the current one
    return device


def open_link(machine: MachineSettings) -> tuple[Link, HostMemory]:
    """PCIe on a GPU, an emulated link on the CPU, and the host memory that it copies from.

    Raises UsageError.
    """
    if machine.device.type == "cpu":
        return EmulatedLink(machine.link_bandwidth), HostMemory()
    if machine.link_bandwidth is not None:
        raise UsageError("--link-bandwidth sets the emulated link; on a GPU the link is real")
    host = HostMemory(CudaDriver(), pin=machine.pin, cpus=cpus_near(machine.device))
    return StagedLink(CudaLink(machine.device, host), host), host


def choose_dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    """`auto`: float32 on the CPU; on a GPU what is stored, bfloat16 where that is quantised.

    stored: the checkpoint's own dtype, None if it is quantised.

    Raises UsageError.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise UsageError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return _DTYPES.get(stored or "bfloat16", torch.float32)


def choose_block_tokens(token_bytes: int, max_context: int, block_bytes: int) -> int:
    """Tokens of a KV block: a power of two near `block_bytes`, an eighth of the context at most."""
    least, most = _BLOCK_TOKENS
    tokens = max(1, min(block_bytes // token_bytes, max_context // 8, most))
    return max(least, 1 << tokens.bit_length() - 1)


def demand_of(
    config: ModelConfig,
    dtype: torch.dtype,
    max_context: int,
    settings: MethodSettings,
    block_tokens: int | None = None,
    *,
    budget: int = 0,
    drafter: ModelConfig | None = None,
    block_bytes: int = _BLOCK_BYTES,
    graphs: bool = False,
) -> Demand:
    """What the model and what drafts for it ask for at the longest context.

    budget: tokens of the retrieval cache, 0 for none. block_bytes: of a KV block, about, if
    block_tokens is None. graphs: whether what drafts is recorded. Raises UsageError.
    """
    shape = KVShape(config.layers, config.kv_heads, config.head_dim, 1, dtype)
    block_tokens = block_tokens or max(
        settings.chunk_size, choose_block_tokens(shape.token_bytes, max_context, block_bytes)
    )
    if settings.chunk_size > block_tokens:
        raise UsageError(
            f"chunk_size {settings.chunk_size} is more than the {block_tokens} tokens of a block"
        )
    shape = replace(shape, block_tokens=block_tokens)
    longest = settings.max_draft_tokens
    drafting = small_model_bytes(drafter, shape, settings) if drafter else 0
    through_host = 0
    if budget:
        drafting += retrieval_bytes(shape, budget, settings.chunk_size, longest, max_context)
        through_host = reader_bytes(shape, fitting_budget(budget, settings.chunk_size, max_context))
    if graphs:
        for recorded in (config if budget else None, drafter):
            if recorded:
                drafting += graph_bytes(recorded, LONGEST, dtype.itemsize)
    return Demand(
        layers=config.layers,
        layer_bytes=FlatLayout.of(layer_shapes(config), dtype).nbytes,
        head_bytes=_head_layout(config, dtype).nbytes,
        embedding_bytes=0 if config.tied else _embedding_layout(config, dtype).nbytes,
        workspace_bytes=workspace_bytes(
            config,
            max_context,
            PREFILL_CHUNK,
            longest + 1,
            block_tokens,
            settings.chunk_size if budget else 0,
            dtype.itemsize,
        ),
        kv=shape,
        context_tokens=max_context,
        max_pass_tokens=longest + 1,
        drafting_bytes=drafting,
        drafting_host_bytes=through_host,
    )


def small_model_bytes(config: ModelConfig, like: KVShape, settings: MethodSettings) -> int:
    """Device bytes of a small model that drafts, its window included."""
    shape = small_model_shape(config, like)
    ends = _head_layout(config, like.dtype).nbytes
    if not config.tied:
        ends += _embedding_layout(config, like.dtype).nbytes
    layers = config.layers * FlatLayout.of(layer_shapes(config), like.dtype).nbytes
    window = dense_bytes(shape, small_model_capacity(config, settings))
    return ends + layers + window + law_bytes(config, 1) + pass_bytes(config, 512, 4)


def plan(
    config: ModelConfig,
    dtype: torch.dtype,
    max_context: int,
    settings: MethodSettings,
    block_tokens: int | None,
    drafter: ModelConfig | None,
    placement: Placement | None,
    available_bytes: int,
    *,
    block_bytes: int = _BLOCK_BYTES,
    graphs: bool = False,
) -> tuple[Demand, Placement, int]:
    """What is asked for, where it goes, and the retrieval budget.

    The retrieval model computes with the target's own weights, so it is there if they all stay on
    the device; if they have to stream, the drafter proposes to the target directly.
    Raises DoesNotFitError, or UsageError.
    """

    def demand(budget: int) -> Demand:
        return demand_of(
            config,
            dtype,
            max_context,
            settings,
            block_tokens,
            budget=budget,
            drafter=drafter,
            block_bytes=block_bytes,
            graphs=graphs,
        )

    without = demand(0)
    if settings.method != "triforce" or (placement and placement.streamed_layers):
        return without, placement or place(without, available_bytes), 0
    if settings.budget is not None:
        cache = settings.budget * without.kv.token_bytes * config.layers
        if cache > available_bytes:
            raise DoesNotFitError(
                f"device memory for a retrieval budget of {settings.budget} tokens",
                cache,
                available_bytes,
                "use a smaller --budget",
            )
    for budget in settings.budgets:
        wanted = demand(budget)
        if placement:
            return wanted, placement, budget
        needed = least_bytes(wanted, streamed_layers=0)
        if needed <= available_bytes:
            return wanted, place(wanted, available_bytes), budget
    if settings.budget is not None and least_bytes(without, streamed_layers=0) <= available_bytes:
        raise DoesNotFitError(
            f"device memory with a retrieval budget of {settings.budget} tokens",
            needed,
            available_bytes,
            "use a smaller --budget or a shorter context",
        )
    return without, place(without, available_bytes), 0


def load(
    checkpoint: Checkpoint,
    machine: MachineSettings,
    dtype: torch.dtype,
    max_context: int,
    settings: MethodSettings,
    drafter: Checkpoint | None,
    block_tokens: int | None,
    placement: Placement | None,
    progress: Progress,
) -> tuple[Model, Runtime, Drafting, ExitStack]:
    """Places and reads the models. The stack closes everything that was opened.

    placement: where everything goes; chosen by `plan` if None.
    Raises DoesNotFitError before anything is read, CheckpointError.
    """
    config, device = checkpoint.config, machine.device
    with ExitStack() as stack:
        link, host = open_link(machine)  # measures a GPU's link, so before the cap is set
        stack.callback(link.close)
        tracer: Tracer = NoTrace()
        if machine.trace:
            tracer = Trace(link)
            link = TracedLink(link, tracer)
        memory = DeviceMemory(device, machine.device_memory)
        stack.callback(memory.close)
        recorder = CudaRecorder(device) if machine.graphs and device.type == "cuda" else None
        demand, placement, budget = plan(
            config,
            dtype,
            max_context,
            settings,
            block_tokens,
            drafter and drafter.config,
            placement,
            memory.available_bytes,
            block_bytes=link.copy_bytes,
            graphs=recorder is not None,
        )
        check_placement(demand, placement, memory.available_bytes)
        check_host(demand, placement, device_is_host=device.type == "cpu")
        rope = Rope(config, device, checkpoint.rope_factors())

        def fill(layer: int, views: dict[str, torch.Tensor]) -> None:
            checkpoint.read_layer(layer, views)
            progress("load", layer + 1, config.layers)

        layout = FlatLayout.of(layer_shapes(config), dtype)
        with memory.typed_errors():
            small = None
            if drafter:
                small = _load_small_model(drafter, demand.kv, settings, memory, host, stack)
            ends = _load_ends(checkpoint, dtype, memory, host, placement.embedding_resident, stack)
            runtime = Runtime(memory, host, link, demand, placement, layout, fill, tracer)
        stack.callback(runtime.close)
        drafting = Drafting(settings, budget, small, recorder)
        return Model(config, ends, rope, device), runtime, drafting, stack.pop_all()


def _load_small_model(
    checkpoint: Checkpoint,
    like: KVShape,
    settings: MethodSettings,
    memory: DeviceMemory,
    host: HostMemory,
    stack: ExitStack,
) -> SmallModel:
    config, dtype = checkpoint.config, like.dtype
    rope = Rope(config, memory.device, checkpoint.rope_factors())
    ends = _load_ends(checkpoint, dtype, memory, host, True, stack)
    layout = FlatLayout.of(layer_shapes(config), dtype)
    store = WeightStore(layout, config.layers, (), memory, host, checkpoint.read_layer)
    stack.callback(store.close)
    return SmallModel(
        Model(config, ends, rope, memory.device),
        store,
        small_model_shape(config, like),
        small_model_capacity(config, settings),
    )


def _load_ends(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    memory: DeviceMemory,
    host: HostMemory,
    embedding_resident: bool,
    stack: ExitStack,
) -> Ends:
    config = checkpoint.config
    allocation = memory.allocate(_head_layout(config, dtype).nbytes, "head")
    stack.callback(memory.free, allocation)
    tensors = _head_layout(config, dtype).views(allocation.bytes)
    for name, view in tensors.items():
        checkpoint.read(name, view)
    embedding = tensors["head"]
    if not config.tied:
        layout = _embedding_layout(config, dtype)
        if embedding_resident:
            place_ = memory.allocate(layout.nbytes, "embedding")
            stack.callback(memory.free, place_)
            buffer = place_.bytes
        else:
            arena = host.arena(layout.nbytes, pin=False)
            stack.callback(arena.close)
            buffer = arena.bytes
        embedding = layout.views(buffer)["embedding"]
        checkpoint.read("embedding", embedding)
    return Ends(embedding, tensors["norm"], tensors["head"])


def _head_layout(config: ModelConfig, dtype: torch.dtype) -> FlatLayout:
    return FlatLayout.of({"norm": (config.hidden,), "head": (config.vocab, config.hidden)}, dtype)


def _embedding_layout(config: ModelConfig, dtype: torch.dtype) -> FlatLayout:
    return FlatLayout.of({"embedding": (config.vocab, config.hidden)}, dtype)
