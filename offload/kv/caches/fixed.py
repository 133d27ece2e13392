"""Caches of forwards whose ends only the device knows: no address, shape or launch depends on them,
as a recorded graph requires.
"""

from __future__ import annotations

from typing import Protocol

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax
from triforce_kernels.attention.dense import DenseKeys, attend_dense
from triforce_kernels.layer import rope_into
from triforce_kernels.recurrent.conv import Convolution
from triforce_kernels.recurrent.delta import DeltaRows
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.kv.caches.attend import PassAttention
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.recent.stores import RecentStores
from triforce_offload.kv.store import KVStore


class FixedCache(Cache, Protocol):
    """A cache that takes the ends of its KV before each forward. The caller makes sure that there
    is room.
    """

    def begin(self) -> None:
        """Take the current ends of the KV."""


class _Ends:
    """The parts of a fixed cache that all have: the ends, windows and states."""

    def __init__(self, stores: RecentStores, device: torch.device) -> None:
        self._stores = stores
        # Each [1] int64.
        self._end, self._windows_end, self._states_end = torch.zeros(
            3, 1, dtype=torch.int64, device=device
        )

    def attend_window(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend_window."""
        return self._stores.windows.attend(layer, qkv, batch, self._windows_end, softmax)

    def dense(self, layer: int, batch: ForwardBatch, *, has_window: bool = False) -> None:
        """Cache.dense: the caller does not know where rows go."""

    def convolve(
        self,
        layer: int,
        inputs: torch.Tensor,
        convolution: Convolution,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Cache.convolve."""
        return self._stores.states.convolve(layer, inputs, convolution, batch, self._states_end)

    def recur(self, layer: int, rows: DeltaRows, batch: ForwardBatch) -> torch.Tensor:
        """Cache.recur."""
        return self._stores.states.recur(layer, rows, batch, self._states_end)


class FixedDense(_Ends):
    """FixedCache: forwards over a DenseKV."""

    def __init__(self, kv: DenseKV, device: torch.device) -> None:
        super().__init__(kv.recent.stores, device)
        self._kv = kv

    def begin(self) -> None:
        """FixedCache.begin."""
        self._end.fill_(self._kv.end)
        self._windows_end.fill_(self._kv.recent.windows_end)
        self._states_end.fill_(self._kv.recent.states_end)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend."""
        keys = self._kv.dense_at(layer, self._end)
        return attend_dense(keys, qkv, batch.rotation, softmax, batch.visible)


class FixedPass(_Ends):
    """FixedCache: passes over a KVStore whose blocks are all on the device. A recorded pass serves
    as long as no block is added and none moves; chunks are not scored.
    """

    def __init__(self, store: KVStore, stores: RecentStores, device: torch.device) -> None:
        """stores: the windows and states of the sequence"""
        super().__init__(stores, device)
        self._store = store

    def begin(self) -> None:
        """FixedCache.begin."""
        stores = self._stores
        self._end.fill_(self._store.tail_length)
        if stores.windows:
            self._windows_end.fill_(stores.windows.end)
        if stores.states:
            self._states_end.fill_(stores.states.end)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend."""
        store = self._store
        keys, values = store.room(layer, batch.end)
        if not store.locations(layer):
            tail = DenseKeys(keys, values, self._end)
            return attend_dense(tail, qkv, batch.rotation, softmax, batch.visible)
        query = rope_into(qkv, *batch.rotation, keys, values, self._end)
        attention = PassAttention(query, store.shape.kv_heads, None, 0, softmax)
        for run in store.runs(layer):
            attention.blocks(*run)
        return attention.end(layer, keys, values, batch.visible, self._end)
