"""The KV of one sequence: prefilled, extended by passes, rolled back, restored."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from triforce_offload.copies import PassCopies
from triforce_offload.errors import DoesNotFitError
from triforce_offload.kv.caches.attend import PassCache
from triforce_offload.kv.caches.prefill import PrefillCache
from triforce_offload.kv.recent.marks import WHOLE, PromptPart
from triforce_offload.kv.recent.stores import NO_STORES, RecentStores
from triforce_offload.kv.scores import ChunkScores
from triforce_offload.kv.store import KVStore
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placing import share_blocks


@dataclass
class PassCounters:
    """Number of passes that were kept, and the bytes that they copied to the device."""

    passes: int = 0
    bytes_to_device: int = 0

    def __sub__(self, other: PassCounters) -> PassCounters:
        return PassCounters(
            self.passes - other.passes, self.bytes_to_device - other.bytes_to_device
        )


class SequenceKV:
    """A sequence's KV, and the memory that forwards over it take.

    `prefill` adds a prompt; passes (`Passes`) add the rows that `keep` selects.

    Between prefills the prefill workspace is reclaimed: it stores KV blocks. The first pass after a
    prefill takes that memory, because the prefill's hidden states are freed by then, and copies
    blocks to it as they cross.
    """

    def __init__(
        self,
        kv: KVStore,
        copies: PassCopies,
        memory: DeviceMemory,
        plan: MemoryPlan,
        recent: RecentStores = NO_STORES,
    ) -> None:
        """recent: the windows and states of the sequence. Raises DoesNotFitError."""
        self.kv = kv
        self.recent = recent
        self._copies = copies
        self._memory = memory
        self._plan = plan
        self._needs = plan.requirements
        self._scores: ChunkScores | None = None
        self.cache = self._pass_cache()
        self._reclaimed_blocks = plan.kv.reclaimed
        self._reclaim_due = self._reclaimed_blocks > 0
        self._counters = PassCounters()
        self._workspace = memory.reserve(self._needs.pass_workspace_bytes, "workspace")

    @property
    def length(self) -> int:
        """Number of tokens whose KV is kept."""
        return self.kv.length

    @property
    def counters(self) -> PassCounters:
        """Counters since the sequence was created."""
        return PassCounters(self._counters.passes, self._counters.bytes_to_device)

    def collect(self, scores: ChunkScores | None) -> None:
        """Collect the scores of chunks in later forwards; None stops collecting."""
        self._scores = scores
        self.cache = self._pass_cache()

    def release_reclaimed(self) -> bool:
        """Free reclaimed memory for good, because another process uses the device's memory. Return
        whether any was in use. Do not call it during a pass.
        """
        self._reclaimed_blocks, self._reclaim_due = 0, False
        was_used = self.kv.release_reclaimed()
        self._memory.trim()
        return was_used

    def give_up_resident(self) -> bool:
        """Evict resident KV to host memory for good. Return whether there was any. Does nothing if
        the plan has no slots through which KV could stream. Do not call it while memory is
        reclaimed or during a pass.

        Raises LinkError.
        """
        placement = self._plan.placement
        streams = placement.kv_slots > 0 and placement.staging_slots > 0
        given = streams and self.kv.give_up_resident()
        self._memory.trim()
        return given

    def use_reclaimed(self) -> None:
        """Let KV use reclaimed memory, once after each prefill, while no copies are under way."""
        if not self._reclaim_due:
            return
        self._reclaim_due = False
        shape, blocks, resident = self.kv.shape, self._plan.kv.blocks, self._plan.kv.resident
        spare = self._memory.available_bytes // shape.block_bytes
        reclaimed = min(self._reclaimed_blocks, blocks - resident, spare)
        if not reclaimed:
            return
        shares = zip(
            share_blocks(resident, shape.layers),
            share_blocks(resident + reclaimed, shape.layers),
            strict=True,
        )
        try:
            self.kv.use_reclaimed([more - less for less, more in shares])
        except DoesNotFitError as error:
            warnings.warn(
                f"{reclaimed} KV blocks stream that could lie on the device: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def keep(self, rows: Sequence[int]) -> None:
        """End a pass and keep a path of its rows."""
        self.cache.keep(rows)
        self._counters.passes += 1
        self._counters.bytes_to_device += self._copies.kept(self.kv)

    @contextmanager
    def prefill(
        self, rows: int, part: PromptPart = WHOLE, *, streams: bool = True
    ) -> Iterator[PrefillCache]:
        """Yield the cache for a forward over `rows` tokens that follow the context. They are kept
        when the block ends; if it fails, call `roll_back`.

        part: which part of a prompt they are
        streams: False if no forward runs, so that nothing has to cross the link

        Raises DoesNotFitError or LinkError.
        """
        self._take_workspace()
        kv = self.kv
        gathered = torch.empty(
            (kv.length + rows) * kv.shape.token_bytes,
            dtype=torch.uint8,
            device=self._memory.device,
        )
        if streams:
            self._copies.begin_prefill(kv)
        conveyor = self._copies.conveyor
        # Only the last tokens of a prompt score its chunks.
        scores = None if part.after else self._scores
        cache = PrefillCache(kv, conveyor, rows, gathered, scores, self.recent, part)
        del gathered
        try:
            yield cache
            cache.keep(range(rows))
        finally:
            cache.close()
        self._set_workspace(self._needs.pass_workspace_bytes)

    def restore(self, tokens: int, layer_kv: Callable[[int], torch.Tensor]) -> None:
        """Fill an empty sequence with KV that was saved elsewhere. Windows and states are restored
        apart.

        layer_kv: returns the KV of a layer, [sides, kv_heads, tokens, head_dim] on the host

        Raises DoesNotFitError or LinkError; call `roll_back` then.
        """
        kv = self.kv
        if kv.length:
            raise RuntimeError(f"restore over {kv.length} tokens that are kept")
        self._take_workspace()
        shape = kv.shape
        gathered = torch.empty(shape.size(tokens), dtype=shape.dtype, device=self._memory.device)
        for layer in range(shape.layers):
            gathered.copy_(layer_kv(layer))
            kv.fill(layer, gathered, tokens, last=True)
        kv.commit_fill(tokens)
        self._set_workspace(self._needs.pass_workspace_bytes)

    def reachable(self, tokens: int) -> int:
        """Return the greatest length up to `tokens` to which `roll_back` can go."""
        return self.recent.reachable(tokens)

    def leave_mark(self) -> None:
        """Make sure that `roll_back` can go back to the current length, however long the text
        becomes, until there are too many such lengths.
        """
        self.recent.want(self.length)

    def roll_back(self, tokens: int) -> None:
        """Drop all but the first `tokens` tokens, and any pass or prefill under way.

        tokens: a length that is `reachable`
        Raises LinkError.
        """
        self._copies.cancel()
        self.recent.roll_back(tokens)
        self.kv.roll_back(tokens)
        if self._scores:
            self._scores.roll_back(tokens)
        self._set_workspace(self._needs.pass_workspace_bytes)

    def close(self) -> None:
        """Free all memory."""
        self._copies.cancel()
        self.kv.close()
        self.recent.close()
        self._memory.free(self._workspace)

    def _pass_cache(self) -> PassCache:
        copies = self._copies
        return PassCache(self.kv, copies.conveyor, self._scores, self.recent, copies.processor)

    def _take_workspace(self) -> None:
        """Take the prefill workspace back from KV blocks."""
        self._copies.cancel()
        if self.kv.release_reclaimed():
            # Trim all of it: otherwise the first tensor of the prefill would be cut out of it and
            # the next one would not fit in the rest.
            self._memory.trim()
        self._reclaim_due = self._reclaimed_blocks > 0
        self._set_workspace(self._needs.prefill_workspace_bytes)

    def _set_workspace(self, size: int) -> None:
        """Count `size` bytes for temporaries from now on."""
        self._memory.free(self._workspace)
        self._workspace = self._memory.reserve(size, "workspace")
