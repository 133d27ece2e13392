"""Keys and values that another model computed: a cache whose layers attend, and write nothing."""

from __future__ import annotations

import torch

from triforce_kernels.attention.attention import PLAIN, Softmax, with_sinks
from triforce_kernels.attention.streaming import attend_cache
from triforce_kernels.layer import rotate
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.shape import CopiedShape
from triforce_offload.memory.device import DeviceMemory


class CopiedKeys:
    """Keys and values of a layer for the first and the last tokens of a text, rotated as they are
    there. Those of the last tokens stand behind those of the first.

    key, value: [kv_heads, capacity, head_dim]
    """

    def __init__(self, shape: CopiedShape, rows: torch.Tensor) -> None:
        """rows: zeros, as `shape.size` says"""
        self.key, self.value = rows
        self._shape = shape
        self._rows = rows
        # Number of the first tokens, and position and number of the last ones.
        self._firsts, self._begin, self._lasts = 0, 0, 0

    def __len__(self) -> int:
        return self._firsts + self._lasts

    @property
    def positions(self) -> tuple[range, range]:
        """Positions of the first tokens, and of the last ones."""
        return range(self._firsts), range(self._begin, self._begin + self._lasts)

    @property
    def end(self) -> int:
        """Position of the token behind those that are known."""
        return self._begin + self._lasts if self._lasts else self._firsts

    def forget(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of the text."""
        self._firsts = min(self._firsts, tokens)
        self._lasts = max(0, min(self._lasts, tokens - self._begin))

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Take the keys and values [2, kv_heads, tokens, head_dim] of the text's tokens from
        `start` on, and forget those of later tokens.
        """
        self.forget(start)
        if start == self._firsts < self._shape.firsts:
            count = min(rows.shape[2], self._shape.firsts - start)
            self._rows[:, :, start : start + count] = rows[:, :, :count]
            self._firsts += count
            start, rows = start + count, rows[:, :, count:]
        further = max(0, rows.shape[2] - self._shape.lasts)
        start, rows = start + further, rows[:, :, further:]
        if not (count := rows.shape[2]):
            return
        if not self._lasts or start != self.end:
            # Tokens between these and the known ones are missing.
            self._begin, self._lasts = start, 0
        self._make_room(count)
        slot = len(self)
        self._rows[:, :, slot : slot + count] = rows
        self._lasts += count

    def _make_room(self, count: int) -> None:
        """Forget the earliest of the last tokens, an eighth at least, if there is no room for
        `count` further ones.
        """
        most, first, end = self._shape.lasts, self._firsts, len(self)
        if self._lasts + count <= most:
            return
        dropped = self._lasts - max(0, min(self._lasts, most - count, most - most // 8))
        for start in range(first, end - dropped, dropped):
            # Pieces that do not overlap with where they come from.
            moved = self._rows[:, :, start + dropped : min(start + 2 * dropped, end)]
            self._rows[:, :, start : start + moved.shape[2]] = moved
        self._lasts -= dropped
        self._begin += dropped


class CopiedKV:
    """Cache: the keys and values of a full-attention layer and of a layer with a window, which all
    layers of a drafter share. A row attends to all of them, or to those in the window.

    It is a FixedCache, too: no address or shape depends on the number of tokens.
    """

    def __init__(
        self,
        full: CopiedShape,
        windowed: CopiedShape | None,
        memory: DeviceMemory,
        purpose: str,
    ) -> None:
        """windowed: None if no layer has a window. Raises DoesNotFitError."""
        shapes = [full, *([windowed] if windowed else [])]
        self._memory = memory
        self._allocation = memory.allocate(sum(each.nbytes for each in shapes), purpose)
        self.kinds: list[CopiedKeys] = []
        first = 0
        for shape in shapes:
            # Zeros, since rows that are padding may attend past the end.
            own = self._allocation.bytes[first : first + shape.nbytes].zero_().view(shape.dtype)
            numbers = own[: torch.Size(shape.size).numel()]
            self.kinds.append(CopiedKeys(shape, numbers.view(shape.size)))
            first += shape.nbytes
        # Index of the last key of each kind, [1] int64 each.
        self._last = torch.zeros(len(shapes), 1, dtype=torch.int64, device=memory.device)

    @property
    def end(self) -> int:
        """Position of the token behind those that are known."""
        return self.kinds[0].end

    def forget(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of the text."""
        for each in self.kinds:
            each.forget(tokens)

    def begin(self) -> None:
        """FixedCache.begin."""
        for last, each in zip(self._last, self.kinds, strict=True):
            last.fill_(len(each) - 1)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend. qkv: queries alone"""
        return self._attend(0, qkv, batch, softmax)

    def attend_window(
        self,
        layer: int,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """Cache.attend_window: only the last tokens are here. qkv: queries alone"""
        return self._attend(1, qkv, batch, softmax)

    def dense(self, layer: int, batch: ForwardBatch, *, has_window: bool = False) -> None:
        """Cache.dense: no layer writes keys."""

    def close(self) -> None:
        self._memory.free(self._allocation)
        self.kinds = []

    def _attend(
        self, kind: int, queries: torch.Tensor, batch: ForwardBatch, softmax: Softmax
    ) -> torch.Tensor:
        keys = self.kinds[kind]
        query = rotate(queries.transpose(0, 1), *batch.rotation)
        heads, rows, head_dim = query.shape
        kv_heads = keys.key.shape[0]
        # The last key stands where the kernel looks for that of the first row. Further rows see the
        # same keys: the batch says that they see none but the first of the rows' own.
        part = attend_cache(
            query.reshape(kv_heads, heads // kv_heads * rows, head_dim),
            keys.key,
            keys.value,
            rows,
            self._last[kind],
            visible=batch.visible,
            cap=softmax.cap,
        )
        return with_sinks(part, softmax.sinks).reshape(query.shape)
