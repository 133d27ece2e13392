"""From a checkpoint on disk to a model on the device, refusing before loading what will not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from triforce_kernels.dispatch import TRITON, KernelsError, backend
from triforce_kernels.limits import MOST_SPLITS

from offload.errors import UsageError
from offload.graphs import CudaRecorder
from offload.kv.shape import KVShape
from offload.link.cuda import CudaLink
from offload.link.emulated import EmulatedLink
from offload.link.link import Link
from offload.link.staging import StagedLink
from offload.link.trace import NoTrace, Trace, TracedLink, Tracer
from offload.memory.device import DeviceMemory
from offload.memory.host import CudaDriver, HostMemory
from offload.memory.numa import cpus_near
from offload.placement import Placement, check_host, check_placement
from offload.runtime import Runtime
from offload.weights import WeightStore
from triforce_core.decoding.drafting import Drafting, SmallModel
from triforce_core.model.checkpoint import Checkpoint
from triforce_core.model.llama import Ends, Model
from triforce_core.model.rope import Rope
from triforce_core.model.tensors import embedding_layout, head_layout, layer_layout
from triforce_core.settings import MachineSettings, MethodSettings
from triforce_core.sizing.demand import plan
from triforce_core.sizing.drafting import small_model_shape, window_tokens

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
        _check_kernels("cpu")
        return torch.device("cpu")
    if device.type != "cuda":
        raise UsageError(f"device {name!r} is not supported; use cuda:0 or cpu")
    count = torch.cuda.device_count()
    device = torch.device("cuda", device.index or 0)
    if device.index >= count:
        raise UsageError(f"device {name!r} is not there; CUDA finds {count} GPUs")
    torch.cuda.set_device(device)  # memory is registered, and streams made, for the current one
    _check_kernels("cuda")
    return device


def _check_kernels(device_type: str) -> None:
    try:
        backend(device_type)
    except KernelsError as error:
        raise UsageError(str(error)) from error


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
            splits=MOST_SPLITS if backend(device.type) == TRITON else 1,
        )
        check_placement(demand, placement, memory.available_bytes)
        check_host(demand, placement, device_is_host=device.type == "cpu")
        rope = Rope(config, device, checkpoint.rope_factors())

        def fill(layer: int, views: dict[str, torch.Tensor]) -> None:
            checkpoint.read_layer(layer, views)
            progress("load", layer + 1, config.layers)

        layout = layer_layout(config, dtype)
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
    layout = layer_layout(config, dtype)
    store = WeightStore(layout, config.layers, (), memory, host, checkpoint.read_layer)
    stack.callback(store.close)
    return SmallModel(
        Model(config, ends, rope, memory.device),
        store,
        small_model_shape(config, like),
        window_tokens(config, settings.max_draft_tokens),
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
    allocation = memory.allocate(head_layout(config, dtype).nbytes, "head")
    stack.callback(memory.free, allocation)
    tensors = head_layout(config, dtype).views(allocation.bytes)
    for name, view in tensors.items():
        checkpoint.read(name, view)
    embedding = tensors["head"]
    if not config.tied:
        layout = embedding_layout(config, dtype)
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
