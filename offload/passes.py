"""The passes of a full model over one text: its KV, and what streams for each of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from offload.conveyor import Conveyor
from offload.copies import start_copies
from offload.errors import DoesNotFitError
from offload.kv.attend import PassCache
from offload.kv.prefill import PrefillCache
from offload.kv.scores import ChunkScores
from offload.kv.store import KVStore
from offload.link.trace import Tracer
from offload.memory.device import DeviceMemory
from offload.placement import Demand, Placement, share_blocks
from offload.weights import StreamedWeights, WeightStore


@dataclass
class PassCounters:
    """Passes that were kept, and the bytes they brought to the device."""

    passes: int = 0
    bytes_to_device: int = 0

    def __sub__(self, other: PassCounters) -> PassCounters:
        return PassCounters(
            self.passes - other.passes, self.bytes_to_device - other.bytes_to_device
        )


class Passes:
    """A text's KV and the forwards over it: text is read (`reading`), then passes follow.

    For every pass: `begin` as soon as the one before is kept (its copies start at once and run
    while whatever comes before it computes), a forward over `weights` and `cache`, `keep`. A pass
    that is begun and never run is dropped by `end`.

    Between texts that are read, the memory that only reading needs, and what `lend` adds, is lent
    to KV blocks: it is taken when the first pass after a reading begins, by when whoever read has
    let go of its hidden states, and blocks come to lie there as they cross.
    """

    def __init__(
        self,
        kv: KVStore,
        weights: WeightStore,
        conveyor: Conveyor,
        memory: DeviceMemory,
        demand: Demand,
        placement: Placement,
        trace: Tracer,
    ) -> None:
        """Raises DoesNotFitError."""
        self.kv = kv
        self.trace = trace
        self.weights = StreamedWeights(weights, conveyor, trace)
        self.cache = PassCache(kv, conveyor)
        self._store = weights
        self._conveyor = conveyor
        self._memory = memory
        self._demand = demand
        self._placement = placement
        self._scores: ChunkScores | None = None
        self._begun: int | None = None
        self._lent_blocks = placement.lent_kv_blocks
        self._lend_due = self._lent_blocks > 0
        self._counters = PassCounters()
        self._workspace = memory.reserve(demand.pass_bytes, "workspace")

    @property
    def length(self) -> int:
        """Tokens whose KV is kept."""
        return self.kv.length

    @property
    def counters(self) -> PassCounters:
        """Since these passes were made."""
        return PassCounters(self._counters.passes, self._counters.bytes_to_device)

    def collect(self, scores: ChunkScores | None) -> None:
        """Collects what each chunk of keys is worth, in readings and passes to come; or no more."""
        self._scores = scores
        self.cache = PassCache(self.kv, self._conveyor, scores)

    def lend(self, nbytes: int) -> None:
        """Lends so much more of the device's memory to KV: somebody gave it back for good. It is
        taken when the next pass begins.
        """
        if blocks := nbytes // self.kv.shape.block_bytes:
            self.end()
            self.kv.reclaim()
            self._memory.trim()
            self._lent_blocks += blocks
            self._lend_due = True

    def give_up_lent(self) -> bool:
        """Takes back, for good, what is lent to KV: somebody else has the device's memory. Says
        whether there was any. Not in the middle of a pass.
        """
        self._lent_blocks, self._lend_due = 0, False
        was_lent = self.kv.reclaim()
        self._memory.trim()
        return was_lent

    def give_up_resident(self) -> bool:
        """Moves KV that stays on the device to the host, for good, and says whether there was any.
        Nothing may be lent. Not where no KV could stream, nor in the middle of a pass.

        Raises LinkError.
        """
        streams = self._placement.kv_slots and self._placement.staging_slots
        given = bool(streams) and self.kv.give_up_resident()
        self._memory.trim()
        return given

    def begin(self) -> None:
        """Starts the copies of a pass over everything that is kept, unless they have been."""
        if self._begun is None:
            if self._lend_due:
                self._lend()
            self.begun(self._start())

    def begun(self, nbytes: int, text: int = 0) -> None:
        """Says that the copies of a pass have been started, of which so many bytes are this text's,
        and which of the pass's texts it is.
        """
        self._begun = nbytes
        self.cache.text = text

    def keep(self, rows: Sequence[int]) -> None:
        """Ends a pass, of which a path of rows is kept."""
        self.cache.keep(rows)
        self._counters.passes += 1
        self._counters.bytes_to_device += self._begun or 0
        self._begun = None

    @contextmanager
    def reading(self, rows: int) -> Iterator[PrefillCache]:
        """The cache for a forward over so many rows of text that follow what is kept. They are kept
        when the block ends; should it fail, call `roll_back`.

        Raises DoesNotFitError or LinkError.
        """
        self.end()
        if self.kv.reclaim():
            # Whole, or the first tensor of the reading would be cut out of it and the next one
            # find no room in what is left.
            self._memory.trim()
        self._lend_due = self._lent_blocks > 0
        self._set_workspace(self._demand.reading_bytes)
        kv = self.kv
        gathered = torch.empty(
            (kv.length + rows) * kv.shape.token_bytes,
            dtype=torch.uint8,
            device=self._memory.device,
        )
        self._start()
        cache = PrefillCache(kv, self._conveyor, rows, gathered, self._scores)
        del gathered
        try:
            yield cache
            cache.keep(range(rows))
        finally:
            cache.close()
        self._set_workspace(self._demand.pass_bytes)

    def restore(self, tokens: int, layer_kv: Callable[[int], torch.Tensor]) -> None:
        """Makes what was kept elsewhere the text's KV, of which nothing is kept yet.

        layer_kv: of a layer, [2, kv_heads, tokens, head_dim] on the host
        Raises DoesNotFitError or LinkError; call `roll_back` then.
        """
        kv = self.kv
        if kv.length:
            raise RuntimeError(f"restore over {kv.length} tokens that are kept")
        self.end()
        if kv.reclaim():
            self._memory.trim()
        self._lend_due = self._lent_blocks > 0
        self._set_workspace(self._demand.reading_bytes)
        shape = kv.shape
        size = (2, shape.kv_heads, tokens, shape.head_dim)
        gathered = torch.empty(size, dtype=shape.dtype, device=self._memory.device)
        for layer in range(shape.layers):
            gathered.copy_(layer_kv(layer))
            kv.fill(layer, gathered, tokens, last=True)
        kv.commit_fill(tokens)
        self._set_workspace(self._demand.pass_bytes)

    def roll_back(self, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens, and whatever was under way.

        Raises LinkError.
        """
        self.end()
        self.kv.roll_back(tokens)
        if self._scores:
            self._scores.roll_back(tokens)
        self._set_workspace(self._demand.pass_bytes)

    def end(self) -> None:
        """Drops a pass that was begun and not run, whoever shares it."""
        self._conveyor.cancel()
        self.begun_no_more()

    def begun_no_more(self) -> None:
        """Says that the copies of a pass that was begun were dropped."""
        self._begun, self.cache.text = None, 0

    def close(self) -> None:
        self.end()
        self.kv.close()
        self._memory.free(self._workspace)

    def _start(self) -> int:
        """Starts the copies of a pass over this text alone. Returns their bytes."""
        copies = start_copies(self._conveyor, self._store, self._placement, [self.kv])
        return sum(copy.nbytes for copy in copies)

    def _lend(self) -> None:
        """Lends what only reading needs to KV blocks, once after each reading."""
        self._lend_due = False
        shape, blocks = self.kv.shape, self._demand.kv_blocks
        resident = min(self._placement.resident_kv_blocks, blocks)
        spare = self._memory.available_bytes // shape.block_bytes
        lent = min(self._lent_blocks, blocks - resident, spare)
        if not lent:
            return
        shares = zip(
            share_blocks(resident, shape.layers),
            share_blocks(resident + lent, shape.layers),
            strict=True,
        )
        try:
            self.kv.lend([more - less for less, more in shares])
        except DoesNotFitError as error:
            warnings.warn(
                f"{lent} KV blocks stream that could lie on the device: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _set_workspace(self, size: int) -> None:
        """Counts another size for temporaries."""
        self._memory.free(self._workspace)
        self._workspace = self._memory.reserve(size, "workspace")
