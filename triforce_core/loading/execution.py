"""Execution of a plan: load the weights to where the plan puts them. Makes no choices."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from triforce_core.decoding.contexts.kv_parts import KVParts, StoreParts
from triforce_core.decoding.contexts.models import Models, SmallModel
from triforce_core.loading.devices import check_processor
from triforce_core.loading.fill_copies import fill_copies, tokens_read
from triforce_core.loading.layer_source import LayerSource, Readable, ReadableDrafter, ReadableHead
from triforce_core.model.config import ModelConfig
from triforce_core.model.heads.head import OwnTensors
from triforce_core.model.heads.kinds import HEADS
from triforce_core.model.rope import Rope
from triforce_core.model.sharing.divided import divided
from triforce_core.model.sharing.share import Share
from triforce_core.model.tensors import Layouts
from triforce_core.model.transformer import Ends, Model
from triforce_core.plan.fitting import Resolved
from triforce_core.plan.levels import small_model_shape, window_tokens
from triforce_core.settings import INT8
from triforce_offload.checkpoint.layer_cache import LayerCache
from triforce_offload.errors import CannotSplitError
from triforce_offload.files import cache_directory
from triforce_offload.graphs import CudaRecorder, Recorder
from triforce_offload.link.link import Link
from triforce_offload.link.trace import Tracer
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.memory.host import HostMemory
from triforce_offload.plan.memory_plan import LayerPlan, Where
from triforce_offload.ranks import Ranks, all_agree
from triforce_offload.runtime import Runtime
from triforce_offload.weights.draft_copies import RECIPE, DraftCopies
from triforce_offload.weights.formats import dtype_name
from triforce_offload.weights.layouts import FlatLayout, Views
from triforce_offload.weights.store import WeightStore

# Called with the name of a phase, the steps done and the number of steps. Calls come from one
# thread at a time, but not always from the same thread.
Progress = Callable[[str, int, int], None]


class _Loaded(NamedTuple):
    """Models whose weights are read, and the runtime with the target's. See `Models`."""

    target: Model
    small: SmallModel | None
    draft_copies: DraftCopies | None
    runtime: Runtime


@dataclass(frozen=True)
class Execution:
    """The inputs for executing a plan on one rank, with an open device.

    checkpoint: this rank's share of the weights
    drafter: checkpoint of the draft model or the head, or None
    share: this rank's share of the model; None if one rank has the whole model
    resources: closes everything that was created; the models take it over
    """

    checkpoint: Readable
    drafter: ReadableDrafter | None
    resolved: Resolved
    memory: DeviceMemory
    host: HostMemory
    ranks: Ranks
    share: Share | None
    progress: Progress
    resources: ExitStack

    def models(self, link: Link, tracer: Tracer) -> Models:
        """Load the models.

        Raises DoesNotFitError, CheckpointError, CannotSplitError (on all ranks, if one rank has a
        matrix that cannot be split), LinkError, RankError or UsageError.
        """
        resolved, memory, sizes = self.resolved, self.memory, self.resolved.sizes
        if resolved.memory.placement.uses_processor:
            check_processor()
        graphs, recorder = self._records_graphs(), None
        if graphs:
            with memory.typed_errors(), memory.current():
                recorder = CudaRecorder(memory.device)
        try:
            loaded = self._loaded(link, tracer)
        except CannotSplitError:
            all_agree(self.ranks, False)
            raise
        if not all_agree(self.ranks, True):
            raise CannotSplitError("the model", ())
        target, small, draft_copies, runtime = loaded
        method = sizes.method
        models = Models(
            target,
            runtime,
            replace(method, draft_kv=INT8) if sizes.rounds_kv else method,
            resolved.budget,
            *self._parts(),
            small,
            draft_copies,
            recorder,
            self.resources.pop_all(),
            weights=resolved.weights,
            same_bits=sizes.same_bits,
            leaves_head_out=resolved.leaves_head_out,
            records_passes=self._records_passes(target, recorder),
        )
        with ExitStack() as undo:
            undo.callback(models.close)
            fill_copies(models, self.progress)
            undo.pop_all()
        return models

    def _loaded(self, link: Link, tracer: Tracer) -> _Loaded:
        """Read all weights, without any exchange between ranks, so that a rank whose load fails can
        still tell the others.

        Raises DoesNotFitError, CheckpointError, CannotSplitError or LinkError.
        """
        sizes, memory, config = self.resolved.sizes, self.memory, self.checkpoint.config
        plan, layouts = self.resolved.memory, sizes.weights
        with memory.typed_errors(), memory.current():
            factors = self.checkpoint.rope_factors()
            rope = Rope(config, memory.device, factors, sizes.max_context)
            target = Model(
                *(config, self._target_ends(), rope, memory.device, self.ranks),
                same_bits=sizes.same_bits,
            )
            small = self._small_model(target)
            draft_copies = self._draft_copies()
            source = LayerSource(self.checkpoint, memory, draft_copies, self._report())
            runtime = Runtime(
                memory, self.host, link, plan, layouts.layers, source.fill, tracer, source.loaded
            )
        self.resources.callback(runtime.close)
        source.end()
        return _Loaded(target, small, draft_copies, runtime)

    def _parts(self) -> tuple[KVParts, tuple[StoreParts, ...]]:
        """Return the heads of each rank in full-attention layers, and in each recent store."""
        whole = self.share.whole if self.share else self.checkpoint.config
        heads = [divided(mixer, self.ranks.count).heads for mixer in whole.stored_mixers]
        full, *recent = (
            StoreParts(KVParts(self.ranks, each.keys), KVParts(self.ranks, each.queries))
            for each in heads
        )
        # Every rank has all of these.
        for there, count in ((whole.ngrams, whole.width), (whole.chooses_keys, 1)):
            if there:
                own = KVParts(self.ranks, [range(count)] * self.ranks.count)
                recent.append(StoreParts(own, own))
        return full.keys, tuple(recent)

    def _report(self) -> Callable[[], None]:
        layers, read = len(self.checkpoint.config.layers), itertools.count(1)
        one_by_one = threading.Lock()

        def report() -> None:
            with one_by_one:
                self.progress("load", next(read), layers)

        return report

    def _records_graphs(self) -> bool:
        """Whether this rank records forwards. Recorded forwards are padded, so either all ranks
        record or none does. Raises RankError.
        """
        graphs = self.resolved.sizes.graphs
        return all_agree(self.ranks, graphs)

    def _records_passes(self, target: Model, recorder: Recorder | None) -> bool:
        """Whether passes are recorded, as all ranks agree: recorded passes have padding. Raises
        RankError.
        """
        plan = self.resolved.memory
        records = recorder is not None and target.recordable and not plan.streams
        records = records and plan.requirements.records_passes
        return all_agree(self.ranks, records)

    def _target_ends(self) -> Ends:
        resident = self.resolved.memory.placement.embedding_resident
        layouts = self.resolved.sizes.weights
        ends = self._ends(self.checkpoint, layouts, self.resources, embedding_resident=resident)
        if (share := self.share) is None:
            return ends
        return replace(ends, first=share.vocab[share.rank].start, widths=share.widths)

    def _draft_copies(self) -> DraftCopies | None:
        plan, layouts = self.resolved.memory, self.resolved.sizes.copy_layouts
        if not self.resolved.budget or not layouts or not plan.placement.copied_layers:
            return None
        needs = plan.requirements
        # The prefill that shows how to round takes a small part of the workspace of a long one.
        is_long = needs.context_tokens >= 8 * tokens_read(needs.context_tokens)
        copies = DraftCopies(
            {layer: layouts[layer] for layer in plan.placement.copied_layers},
            self.memory,
            needs.decoding_bytes,
            self._copies_cache(),
            needs.prefill_workspace_bytes // 2 if is_long else 0,
        )
        self.resources.callback(copies.close)
        return copies

    def _copies_cache(self) -> LayerCache | None:
        """Return the cache in which draft copies persist between runs; None if the weights are not
        in files.
        """
        checkpoint, ranks = self.checkpoint, self.ranks
        if not checkpoint.files:
            return None
        sizes = self.resolved.sizes
        # All that the copies depend on, by the rounding of products in the prefill too.
        tokens = tokens_read(self.resolved.memory.requirements.context_tokens)
        recipe = (
            f"{RECIPE} in {sizes.method.bits_of_copies} bits of {dtype_name(sizes.dtype)}, "
            f"{self.resolved.weights} weights on {self.memory.device.type}, {tokens} tokens"
        )
        if ranks.count > 1:
            recipe += f", rank {ranks.index} of {ranks.count}"
        return LayerCache(cache_directory() / "layers", recipe, checkpoint.files)

    def _small_model(self, target: Model) -> SmallModel | None:
        """Load the draft model or the head, all of it onto the device."""
        if (checkpoint := self.drafter) is None:
            return None
        config, memory = self.resolved.sizes.drafter, self.memory
        like = self.resolved.memory.requirements.kv
        window = window_tokens(config, self.resolved.memory.requirements.max_draft_tokens)
        layouts = self.resolved.sizes.drafter_layouts
        with ExitStack() as stack:
            if config.joins:
                model = self._head(checkpoint, config, layouts, target, stack)
            else:
                ends = self._ends(checkpoint, layouts, stack, embedding_resident=True)
                rope = Rope(config, memory.device, checkpoint.rope_factors(), window)
                model = Model(config, ends, rope, memory.device)
            source = LayerSource(checkpoint, memory)
            kept = [LayerPlan(Where.DEVICE, layout.nbytes) for layout in layouts.layers]
            store = WeightStore(layouts.layers, kept, memory, self.host, source.fill)
            stack.callback(store.close)
            small = SmallModel(
                model,
                store,
                small_model_shape(config, like),
                window,
                stack.pop_all(),
            )
        # Not `small.close`, which would keep a dropped model alive.
        self.resources.callback(small.resources.close)
        return small

    def _head(
        self,
        checkpoint: ReadableHead,
        config: ModelConfig,
        layouts: Layouts,
        target: Model,
        stack: ExitStack,
    ) -> Model:
        """Load what a head has of its own outside its layer."""
        tensors = self._tensors(checkpoint, layouts.head, "head", stack)
        embedding = None
        if (layout := layouts.embedding) is not None:
            embedding = self._tensors(checkpoint, layout, "embedding", stack)["embedding"]
        tokens = checkpoint.tokens()
        tokens = None if tokens is None else tokens.to(self.memory.device)
        own = OwnTensors(tensors, embedding, tokens)
        return HEADS[type(config.joins)](config, target, own)

    def _tensors(
        self, checkpoint: Readable, layout: FlatLayout, purpose: str, stack: ExitStack
    ) -> Views:
        """Load tensors outside the layers onto the device."""
        allocation = self.memory.allocate(layout.nbytes, purpose)
        stack.callback(self.memory.free, allocation)
        tensors = layout.views(allocation.bytes)
        for name, view in tensors.items():
            checkpoint.read(name, view)
        return tensors

    def _ends(
        self,
        checkpoint: Readable,
        layouts: Layouts,
        stack: ExitStack,
        *,
        embedding_resident: bool,
    ) -> Ends:
        """Load the head, and the embedding if it is a separate matrix."""
        tensors = self._tensors(checkpoint, layouts.head, "head", stack)
        if (layout := layouts.embedding) is None:
            embedding = tensors["head"]
        elif embedding_resident:
            embedding = self._tensors(checkpoint, layout, "embedding", stack)["embedding"]
        else:
            arena = self.host.arena(layout.nbytes, pin=False)
            stack.callback(arena.close)
            embedding = layout.views(arena.bytes)["embedding"]
            checkpoint.read("embedding", embedding)
        if not checkpoint.config.streams:
            table = checkpoint.per_layer_table()
            return Ends(embedding, tensors["norm"], tensors["head"], per_layer_inputs=table)
        mean = tensors["last_mix_down"], tensors["last_mix_up"]
        norm, table = tensors["last_mix_norm"], checkpoint.ngram_table()
        return Ends(embedding, norm, tensors["head"], mean, table)
