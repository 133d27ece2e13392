"""From a checkpoint on disk to a model on the device, refusing before loading what will not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from offload.cuda import CudaLink
from offload.device import DeviceMemory
from offload.emulated import EmulatedLink
from offload.errors import UsageError
from offload.host import HostArena
from offload.kv import KVShape
from offload.layout import FlatLayout
from offload.link import Link
from offload.placement import Demand, Placement, check_host, check_placement, place
from offload.runtime import Runtime

from .checkpoint import Checkpoint
from .config import ModelConfig
from .model import Ends, Model, layer_shapes
from .rope import Rope
from .workspace import workspace_bytes

PREFILL_CHUNK = 1024
_BLOCK_BYTES = 8 << 20
_BLOCK_TOKENS = (16, 4096)
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


def open_link(device: torch.device, bandwidth: float | None) -> Link:
    """PCIe on a GPU, an emulated link on the CPU. Raises UsageError."""
    if device.type == "cpu":
        return EmulatedLink(bandwidth)
    if bandwidth is not None:
        raise UsageError("--link-bandwidth sets the emulated link; on a GPU the link is real")
    return CudaLink(device)


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


def choose_block_tokens(token_bytes: int, max_context: int) -> int:
    """Tokens of a KV block: a power of two near 8 MiB, and an eighth of the context at most."""
    least, most = _BLOCK_TOKENS
    tokens = max(1, min(_BLOCK_BYTES // token_bytes, max_context // 8, most))
    return max(least, 1 << tokens.bit_length() - 1)


def demand_of(
    config: ModelConfig,
    dtype: torch.dtype,
    max_context: int,
    max_pass_tokens: int,
    block_tokens: int | None,
) -> Demand:
    """What the model asks for at its longest context."""
    itemsize = dtype.itemsize
    shape = KVShape(config.layers, config.kv_heads, config.head_dim, 1, dtype)
    block_tokens = block_tokens or choose_block_tokens(shape.token_bytes, max_context)
    return Demand(
        layers=config.layers,
        layer_bytes=FlatLayout.of(layer_shapes(config), dtype).nbytes,
        head_bytes=_head_layout(config, dtype).nbytes,
        embedding_bytes=0 if config.tied else _embedding_layout(config, dtype).nbytes,
        workspace_bytes=workspace_bytes(
            config,
            max_context,
            PREFILL_CHUNK,
            max_pass_tokens,
            max_context // block_tokens,
            itemsize,
        ),
        kv=KVShape(config.layers, config.kv_heads, config.head_dim, block_tokens, dtype),
        context_tokens=max_context,
        max_pass_tokens=max_pass_tokens,
    )


def load(
    checkpoint: Checkpoint,
    device: torch.device,
    device_memory: int | None,
    link_bandwidth: float | None,
    dtype: torch.dtype,
    max_context: int,
    max_pass_tokens: int,
    block_tokens: int | None,
    placement: Placement | None,
    progress: Progress,
) -> tuple[Model, Runtime, ExitStack]:
    """Places and reads the model. The stack closes everything that was opened.

    placement: where everything goes; chosen by `place` if None.
    Raises DoesNotFitError before anything is read, CheckpointError.
    """
    config = checkpoint.config
    demand = demand_of(config, dtype, max_context, max_pass_tokens, block_tokens)
    with ExitStack() as stack:
        link = open_link(device, link_bandwidth)  # measures a GPU's link, so before the cap is set
        stack.callback(link.close)
        memory = DeviceMemory(device, device_memory)
        stack.callback(memory.close)
        if placement is None:
            placement = place(demand, memory.available_bytes)
        check_placement(demand, placement, memory.available_bytes)
        check_host(demand, placement, device_is_host=device.type == "cpu")
        rope = Rope(config, device, checkpoint.rope_factors())

        def fill(layer: int, views: dict[str, torch.Tensor]) -> None:
            checkpoint.read_layer(layer, views)
            progress("load", layer + 1, config.layers)

        layout = FlatLayout.of(layer_shapes(config), dtype)
        with memory.typed_errors():
            ends = _load_ends(checkpoint, dtype, memory, placement.embedding_resident, stack)
            runtime = Runtime(memory, link, demand, placement, layout, fill)
        stack.callback(runtime.close)
        return Model(config, ends, rope, device), runtime, stack.pop_all()


def _load_ends(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    memory: DeviceMemory,
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
            arena = HostArena(layout.nbytes, pin=False)
            stack.callback(arena.close)
            buffer = arena.bytes
        embedding = layout.views(buffer)["embedding"]
        checkpoint.read("embedding", embedding)
    return Ends(embedding, tensors["norm"], tensors["head"])


def _head_layout(config: ModelConfig, dtype: torch.dtype) -> FlatLayout:
    return FlatLayout.of({"norm": (config.hidden,), "head": (config.vocab, config.hidden)}, dtype)


def _embedding_layout(config: ModelConfig, dtype: torch.dtype) -> FlatLayout:
    return FlatLayout.of({"embedding": (config.vocab, config.hidden)}, dtype)
