"""From a checkpoint on disk to a model on the device, refusing before loading what will not fit."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from triforce_core.decoding.kv_parts import KVParts
from triforce_core.decoding.models import Models, SmallModel
from triforce_core.devices import choose_dtype, open_link, rank_device, set_threads
from triforce_core.layer_source import LayerSource, Readable
from triforce_core.model.rope import Rope
from triforce_core.model.share import Share, mlp_unit
from triforce_core.model.tensors import Layouts, dense_layouts
from triforce_core.model.transformer import Ends, Model
from triforce_core.settings import DENSE, INT8, SPLIT, STORED, EngineConfig
from triforce_core.sizing.demand import Wanted
from triforce_core.sizing.drafting import small_model_shape, window_tokens
from triforce_core.sizing.fitting import Fitted, fit, with_what_fits
from triforce_core.storage import asks_for_split_kv, choose_layouts, with_split_unasked
from triforce_kernels.dispatch import TRITON, backend
from triforce_kernels.limits import MOST_SPLITS
from triforce_kernels.weights.blocks import has_kernel
from triforce_kernels.weights.linear import widens
from triforce_offload.checkpoint.layer_cache import LayerCache
from triforce_offload.errors import CannotSplitError, DoesNotFitError, UsageError
from triforce_offload.files import cache_directory
from triforce_offload.graphs import CudaRecorder
from triforce_offload.int4_copies import RECIPE, Int4Copies
from triforce_offload.kv.direct import reads_in_place
from triforce_offload.kv.shape import KVShape
from triforce_offload.link.staging import StagedLink
from triforce_offload.link.trace import NoTrace, Trace, TracedLink, Tracer
from triforce_offload.memory.available import available_host_bytes
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.memory.host import HostMemory
from triforce_offload.placing import place_on_host
from triforce_offload.plan import READ_AHEAD, LayerPlan, MemoryPlan, Where
from triforce_offload.ranks import Alone, Ranks
from triforce_offload.runtime import Runtime
from triforce_offload.weights import WeightStore

# Called with what is under way, how much of it is done, and how much there is; by one thread at a
# time, not always the same.
Progress = Callable[[str, int, int], None]


def load(
    checkpoint: Readable,
    config: EngineConfig,
    max_context: int,
    drafter: Readable | None,
    progress: Progress,
    ranks: Ranks | None = None,
) -> Models:
    """Places and reads the models. max_context: tokens of the longest text. ranks: that share the
    model, of which this one reads its part.

    Raises UsageError, DoesNotFitError before anything is read, CheckpointError or RankError.
    """
    unsplit: frozenset[str] = frozenset()
    while True:
        try:
            return _load(checkpoint, config, max_context, drafter, progress, ranks, unsplit)
        except CannotSplitError as error:
            # Ranks would have to begin anew together.
            if ranks is not None and ranks.count > 1:
                raise
            unsplit |= error.names
            which, count = min(unsplit), len(unsplit)
            kept = f"{count} matrices are kept dense, {which} among them"
            warnings.warn(
                f"{kept if count > 1 else f'{which} is kept dense'}, with more exceptions than "
                "the split format has room for; the model is read once more",
                RuntimeWarning,
                stacklevel=2,
            )


def _load(
    checkpoint: Readable,
    config: EngineConfig,
    max_context: int,
    drafter: Readable | None,
    progress: Progress,
    ranks: Ranks | None,
    unsplit: frozenset[str],
) -> Models:
    """The same. Raises CannotSplitError for matrices that must be added to `unsplit`."""
    machine, ranks = config.machine, ranks or Alone()
    device, own_device = rank_device(machine, ranks)
    set_threads(machine, device, ranks)
    share = None
    if ranks.count > 1:
        unit = mlp_unit(checkpoint.config, checkpoint.pieces)
        share = Share.of(checkpoint.config, ranks.index, ranks.count, unit)
        checkpoint = checkpoint.shared(share)
    dtype = choose_dtype(config.dtype, checkpoint.stored_dtype, device)
    with ExitStack() as stack:
        # Measures a GPU's link, so before the cap is set.
        link, host = open_link(machine, device)
        stack.callback(lambda: link.close())
        on_gpu = device.type == "cuda"
        ranks.meet(device, own_device=own_device)
        wanted = Wanted(
            checkpoint.config,
            dtype,
            max_context,
            config.method,
            config.block_tokens,
            drafter and drafter.config,
            block_bytes=link.copy_bytes,
            # What goes through host memory cannot be recorded.
            graphs=machine.cuda_graphs and on_gpu and own_device,
            splits=MOST_SPLITS if backend(device) == TRITON else 1,
            gathers_through_host=not (machine.pin and reads_in_place(device)),
            widens=widens(device, dtype),
            kv_split=asks_for_split_kv(config, dtype),
            rounds_kv=config.method.rounds_kv(on_gpu=on_gpu),
            kernels_on_gpu=on_gpu and backend(device) == TRITON,
            sequences=config.sequences,
        )
        # Of this machine's memory, before any rank takes some.
        host_share = share.of_machine(ranks.local, ranks.here) if share else 1.0
        host_bytes_here = int(available_host_bytes() * host_share)
        limit = machine.device_memory
        if limit is None and not own_device:
            if on_gpu:
                raise UsageError("ranks that share a GPU need --device-memory, of each")
            limit = host_bytes_here
        layouts = choose_layouts(checkpoint, config, wanted, device, host_bytes_here, unsplit)
        wanted = replace(wanted, layouts=layouts)
        memory = DeviceMemory(device, limit, wanted.stored_bytes)
        stack.callback(memory.close)
        asked = wanted.layouts
        wanted = with_split_unasked(
            config,
            wanted,
            device,
            memory.available_bytes,
            unsplit,
            alone=ranks.count == 1,
        )
        # Decoding without a kernel brings small tables from the host, which no graph can hold.
        fused = backend(device) == TRITON or not wanted.weights.split
        fused = fused and all(has_kernel(kind, device) for kind in wanted.weights.block_types)
        graphs = wanted.graphs and fused
        wanted = replace(wanted, graphs=graphs)

        def fits(wanted: Wanted, most: int | None) -> Fitted:
            fitted = fit(wanted, memory.available_bytes, config.placement, most)
            fitted.memory.check(memory.available_bytes)
            plan = _placed_on_host(
                checkpoint,
                fitted.memory,
                host_bytes_here,
                machine.host_memory and int(machine.host_memory * host_share),
                on_gpu,
            )
            return replace(fitted, memory=plan)

        def refusal(context: int) -> DoesNotFitError | None:
            shorter = replace(
                wanted, max_context=context, method=replace(wanted.method, budget=None)
            )
            try:
                fits(shorter, None)
            except DoesNotFitError as error:
                return error
            return None

        def fitting(most: int | None) -> Fitted:
            try:
                return fits(wanted, most)
            except DoesNotFitError as error:
                if config.placement is not None:
                    raise
                raise with_what_fits(error, max_context, refusal, config.method.budget) from error

        fitted = fitting(None)
        if fitted.memory.weights_file_bytes and wanted.layouts is not asked:
            # Layers that are read from files would be coded in each pass.
            wanted = replace(wanted, layouts=asked)
            fitted = fitting(None)
        layouts = wanted.weights
        if (budget := ranks.least(fitted.budget)) != fitted.budget:
            fitted = fitting(budget)
        plan, demand = fitted.memory, fitted.memory.requirements
        placement, reads_files = plan.placement, plan.weights_file_bytes > 0
        if reads_files:
            # The files stay open as long as the models.
            checkpoint = checkpoint.reopened()
            stack.callback(checkpoint.close)
        if on_gpu or reads_files:
            link = StagedLink(link, host, reading=(READ_AHEAD, max(demand.layer_bytes)))
        tracer: Tracer = NoTrace()
        if config.trace:
            tracer = Trace(link)
            link = TracedLink(link, tracer)
        layers = len(checkpoint.config.layers)
        read, one_by_one = itertools.count(1), threading.Lock()

        def report() -> None:
            with one_by_one:
                progress("load", next(read), layers)

        # Recorded forwards are padded, and so ranks record alike or not at all.
        recordable = placement.embedding_resident or layouts.embedding is None
        if ranks.count > 1:
            graphs = bool(ranks.least(int(graphs and recordable)))
        with memory.typed_errors(), memory.current():
            rope = Rope(checkpoint.config, device, checkpoint.rope_factors())
            recorder = CudaRecorder(device) if graphs else None
            small = None
            if drafter:
                most = config.method.max_draft_tokens
                small = _load_small_model(drafter, demand.kv, most, memory, host)
                # Not the model's own method: a model that is dropped must not be held by it.
                stack.callback(small.resources.close)
            resident = placement.embedding_resident
            ends = _load_ends(checkpoint, layouts, memory, host, resident, stack)
            if share is not None:
                ends = replace(ends, first=share.vocab[share.rank].start, widths=share.widths)
            int4_copies = None
            if fitted.budget and placement.int4_layers:
                int4_copies = Int4Copies(
                    wanted.int4_layout,
                    placement.int4_layers,
                    memory,
                    demand.decoding_bytes,
                    _copies_cache(checkpoint, dtype, ranks),
                )
                stack.callback(int4_copies.close)
            source = LayerSource(checkpoint, memory, layouts.layers, int4_copies, report)
            runtime = Runtime(
                memory,
                host,
                link,
                plan,
                layouts.layers,
                source.fill,
                tracer,
                source.loaded,
            )
        stack.callback(runtime.close)
        source.end()
        target = Model(checkpoint.config, ends, rope, device, ranks)
        return Models(
            target,
            runtime,
            replace(config.method, draft_kv=INT8) if wanted.rounds_kv else config.method,
            fitted.budget,
            KVParts(ranks, share.kv_heads if share else [range(demand.kv.kv_heads)]),
            small,
            int4_copies,
            recorder,
            stack.pop_all(),
            weights=STORED if layouts.block_types else SPLIT if layouts.split else DENSE,
        )


def _copies_cache(checkpoint: Readable, dtype: torch.dtype, ranks: Ranks) -> LayerCache | None:
    """Where layers in 4 bits are kept; numbers that are in no file are not."""
    if not checkpoint.files:
        return None
    recipe = f"{RECIPE} of {str(dtype).removeprefix('torch.')}"
    if ranks.count > 1:
        recipe += f", rank {ranks.index} of {ranks.count}"
    return LayerCache(cache_directory() / "layers", recipe, checkpoint.files)


def _placed_on_host(
    checkpoint: Readable,
    plan: MemoryPlan,
    limit: int,
    host_memory: int | None,
    on_gpu: bool,
) -> MemoryPlan:
    """With layers that the host has no room for in their files. limit: bytes that are free.

    Raises DoesNotFitError.
    """
    if not on_gpu:
        # The emulated device takes host memory, like what streams to it.
        taken = plan.device_bytes
        if taken > limit:
            remedy = "use a shorter context, a smaller model or less device memory"
            raise DoesNotFitError("host memory for the emulated device", taken, limit, remedy)
        limit -= taken
    if host_memory is not None:
        limit = min(limit, host_memory)
    if checkpoint.files:
        plan = place_on_host(plan, limit)
    plan.check_host(limit)
    return plan


def _load_small_model(
    checkpoint: Readable,
    like: KVShape,
    max_draft_tokens: int,
    memory: DeviceMemory,
    host: HostMemory,
) -> SmallModel:
    config, dtype = checkpoint.config, like.dtype
    rope = Rope(config, memory.device, checkpoint.rope_factors())
    layouts = dense_layouts(config, dtype)
    with ExitStack() as stack:
        ends = _load_ends(checkpoint, layouts, memory, host, True, stack)
        source = LayerSource(checkpoint, memory, layouts.layers)
        kept = [LayerPlan(Where.DEVICE, layout.nbytes) for layout in layouts.layers]
        store = WeightStore(layouts.layers, kept, memory, host, source.fill)
        stack.callback(store.close)
        return SmallModel(
            Model(config, ends, rope, memory.device),
            store,
            small_model_shape(config, like),
            window_tokens(config, max_draft_tokens),
            stack.pop_all(),
        )


def _load_ends(
    checkpoint: Readable,
    layouts: Layouts,
    memory: DeviceMemory,
    host: HostMemory,
    embedding_resident: bool,
    stack: ExitStack,
) -> Ends:
    allocation = memory.allocate(layouts.head.nbytes, "head")
    stack.callback(memory.free, allocation)
    tensors = layouts.head.views(allocation.bytes)
    for name, view in tensors.items():
        checkpoint.read(name, view)
    embedding = tensors["head"]
    if layouts.embedding is not None:
        layout = layouts.embedding
        if embedding_resident:
            resident = memory.allocate(layout.nbytes, "embedding")
            stack.callback(memory.free, resident)
            buffer = resident.bytes
        else:
            arena = host.arena(layout.nbytes, pin=False)
            stack.callback(arena.close)
            buffer = arena.bytes
        embedding = layout.views(buffer)["embedding"]
        checkpoint.read("embedding", embedding)
    return Ends(embedding, tensors["norm"], tensors["head"])
