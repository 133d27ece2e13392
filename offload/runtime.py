"""Everything that outlives a request on the device, and what a request adds to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from offload.conveyor import Conveyor, Transfer
from offload.errors import LinkError
from offload.kv.attend import KVPass, PrefillPass
from offload.kv.scores import ChunkScores
from offload.kv.store import RING as KV_RING
from offload.kv.store import KVStore
from offload.layouts import FlatLayout
from offload.link.link import Link
from offload.link.trace import Tracer
from offload.memory.device import DeviceMemory
from offload.memory.host import HostArena, HostBlocks, HostMemory
from offload.placement import Demand, Placement, share_blocks
from offload.weights import RING as WEIGHT_RING
from offload.weights import Fill, WeightPass, WeightStore


class Runtime:
    """Link, device memory, weights, slots and host blocks of one engine, on one device."""

    def __init__(
        self,
        memory: DeviceMemory,
        host: HostMemory,
        link: Link,
        demand: Demand,
        placement: Placement,
        layer_layout: FlatLayout,
        fill: Fill,
        trace: Tracer,
    ) -> None:
        """Allocates and fills the layers' weights. trace: is told what passes compute.

        Raises DoesNotFitError and what `fill` raises.
        """
        self.memory = memory
        self.host = host
        self.link = link
        self.trace = trace
        self.demand = demand
        self.placement = placement
        with ExitStack() as undo:
            self._buffers: list[HostArena] = []
            self.host_blocks = HostBlocks(demand.kv.block_bytes, host)
            undo.callback(self.host_blocks.close)
            self.weights = WeightStore(
                layer_layout,
                demand.layers,
                placement.streamed_layers,
                memory,
                host,
                fill,
            )
            undo.callback(self.weights.close)
            self._slots: list = []
            self.conveyor = Conveyor(
                link,
                {
                    WEIGHT_RING: self._ring(
                        placement.weight_slots, demand.layer_bytes, "weight slots"
                    ),
                    KV_RING: self._ring(placement.kv_slots, demand.kv.block_bytes, "KV slots"),
                },
            )
            self._staging = self._ring(
                placement.staging_slots, demand.kv.block_bytes, "staging slots"
            )
            undo.pop_all()

    @property
    def host_bytes(self) -> int:
        """Host memory in use for what streams, and for an embedding that found no room."""
        embedding = 0 if self.placement.embedding_resident else self.demand.embedding_bytes
        buffers = sum(arena.bytes.numel() for arena in self._buffers)
        return self.weights.host_bytes + self.host_blocks.nbytes + buffers + embedding

    def host_buffers(self, size: int, count: int) -> list[torch.Tensor]:
        """`count` buffers of `size` bytes that requests use one after another.

        Raises DoesNotFitError.
        """
        if len(self._buffers) < count or any(b.bytes.numel() < size for b in self._buffers):
            self._close_buffers()
            # Each its own arena, so that none begins in the middle of a registered piece.
            self._buffers = [self.host.arena(size) for _ in range(count)]
        return [arena.bytes[:size] for arena in self._buffers[:count]]

    @contextmanager
    def session(
        self, prompt_tokens: int, new_tokens: int, scores: ChunkScores | None = None
    ) -> Iterator[Session]:
        """Memory for one request: tail, resident KV blocks and the workspace of its forwards.

        scores: collects, in prefill and passes, what each chunk of keys is worth.
        Raises DoesNotFitError.
        """
        with ExitStack() as stack:
            workspace = self.memory.reserve(self.demand.workspace_bytes, "workspace")
            stack.callback(self.memory.free, workspace)
            session = Session(self, self._staging, prompt_tokens, new_tokens, scores)
            stack.callback(session.close)
            yield session

    def close(self) -> None:
        with suppress(LinkError):
            self.link.synchronize()
        self.conveyor.close()
        self.weights.close()
        self.host_blocks.close()
        self._close_buffers()
        for allocation in self._slots:
            self.memory.free(allocation)
        self._slots.clear()
        self._staging.clear()

    def _close_buffers(self) -> None:
        for arena in self._buffers:
            arena.close()
        self._buffers = []

    def _ring(self, slots: int, slot_bytes: int, purpose: str) -> list[torch.Tensor]:
        if not slots:
            return []
        allocation = self.memory.allocate(slots * slot_bytes, purpose)
        self._slots.append(allocation)
        return list(allocation.bytes.split(slot_bytes))


class Session:
    """One request's KV and its passes.

    prefill() once, then for every pass: begin_pass() as soon as the pass before is committed (its
    copies start at once and run while whatever comes before it computes), forward over `weights`
    and `cache`, commit(). A pass that is begun and never run is dropped by close().

    passes, pass_bytes: of those that were committed
    """

    def __init__(
        self,
        runtime: Runtime,
        staging: list[torch.Tensor],
        prompt_tokens: int,
        new_tokens: int,
        scores: ChunkScores | None,
    ) -> None:
        demand, memory = runtime.demand, runtime.memory
        kv = demand.kv
        blocks = (prompt_tokens + new_tokens) // kv.block_tokens * kv.layers
        resident = min(blocks, runtime.placement.resident_kv_blocks)
        runtime.host_blocks.reserve(blocks - resident)
        self._runtime = runtime
        self._prompt_tokens = prompt_tokens
        self._scores = scores
        self.kv = KVStore(
            kv,
            demand.max_pass_tokens,
            share_blocks(resident, kv.layers),
            memory,
            runtime.host_blocks,
            runtime.link,
            staging,
        )
        self.passes = 0
        self.pass_bytes = 0
        self._begun: list[Transfer] | None = None
        self.weights = WeightPass(runtime.weights, runtime.conveyor, runtime.trace)
        self.trace = runtime.trace
        self.cache = KVPass(self.kv, runtime.conveyor, scores)

    @contextmanager
    def prefill(self) -> Iterator[PrefillPass]:
        """The cache for the prompt's forward; its KV is committed when the block ends."""
        kv = self.kv.shape
        gathered = torch.empty(
            self._prompt_tokens * kv.token_bytes,
            dtype=torch.uint8,
            device=self._runtime.memory.device,
        )
        self._runtime.conveyor.start(
            transfer
            for layer in range(kv.layers)
            for transfer in self._runtime.weights.transfers(layer)
        )
        yield PrefillPass(self.kv, self._prompt_tokens, gathered, self._scores)
        self.kv.commit_fill(self._prompt_tokens)

    def begin_pass(self) -> None:
        """Starts the copies of a pass over everything committed so far, unless they have been."""
        if self._begun is None:
            self._begun = self._schedule()
            self._runtime.conveyor.start(self._begun)

    def commit(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens of the pass that ended."""
        self.kv.commit(tokens)
        self.passes += 1
        self.pass_bytes += sum(transfer.source.numel() for transfer in self._begun or ())
        self._begun = None

    def close(self) -> None:
        self._runtime.conveyor.cancel()
        self.kv.close()

    def _schedule(self) -> list[Transfer]:
        return [
            transfer
            for layer in range(self.kv.shape.layers)
            for transfer in (
                *self._runtime.weights.transfers(layer),
                *self.kv.transfers(layer),
            )
        ]
