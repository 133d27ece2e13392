"""The KV of one sequence in the layers that have a window: always on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_kernels.attention.attention import partial_attention
from triforce_kernels.attention.streaming import attend_cache
from triforce_kernels.layer import rope_into
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.windows.marks import Mark, Marks, reaches
from triforce_offload.kv.windows.shape import WindowShape
from triforce_offload.memory.device import DeviceMemory, put


class WindowStore:
    """The last tokens of a sequence, dense, for every layer with a window.

    The pass and the retrieval level attend to the same rows. Rows of a forward are written behind
    the tokens that are held, by whichever of the two runs; `keep` makes some of them tokens of the
    text. The oldest tokens leave now and then, many at a time.

    A text can be cut to a length whose window is held, here or in a mark. Marks are copied to host
    memory when their window is about to leave.

    rows: [layers, 2, kv_heads, capacity, head_dim]
    start: number of tokens of the text before the first row
    length: number of tokens of the text
    """

    def __init__(self, shape: WindowShape, max_pass_tokens: int, memory: DeviceMemory) -> None:
        """Raises DoesNotFitError."""
        self.shape = shape
        self.start = self.length = 0
        self.marks = Marks()
        self._whole = True
        self._memory = memory
        capacity = shape.capacity(max_pass_tokens)
        self._allocation = memory.allocate(shape.device_bytes(max_pass_tokens), "windows")
        # Zeros, since a forward with a fixed shape also reads past the end, with a weight of zero.
        numbers = self._allocation.bytes.zero_().view(shape.dtype)
        size = torch.Size(shape.rows_shape(capacity))
        self.rows = numbers[: size.numel()].view(size)
        self._wanted: list[int] = []

    @property
    def end(self) -> int:
        """Index of the row after the last token."""
        return self.length - self.start

    def has_room(self, rows: int) -> bool:
        """Whether a forward may write `rows` rows behind the last token."""
        return self.end + rows <= self.rows.shape[3]

    def attend(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, end: int | torch.Tensor
    ) -> torch.Tensor:
        """Cache.attend_window.

        end: index of the row of the whole batch's first token, a number or [1] int64 on the device
        Raises RuntimeError if there is no room.
        """
        on_device = isinstance(end, torch.Tensor)
        if not on_device and end + batch.end > self.rows.shape[3]:
            raise RuntimeError(f"{end + batch.end} rows of windows of {self.rows.shape[3]}")
        keys, values = self.rows[layer]
        start = end if on_device else end + batch.first
        query = rope_into(qkv, *batch.rotation, keys, values, start)
        heads, tokens, head_dim = query.shape
        packed = query.reshape(keys.shape[0], heads // keys.shape[0] * tokens, head_dim)
        window = self.shape.window
        if batch.parents is None:
            out = attend_cache(packed, keys, values, tokens, start, window)
        else:
            first = max(0, start + 1 - window)
            seen = batch.within(window, start - first)
            mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            mask.masked_fill_(~seen, float("-inf"))
            span = slice(first, start + tokens)
            mask = mask.repeat(heads // keys.shape[0], 1)
            out = partial_attention(packed, keys[:, span], values[:, span], mask=mask).out
        return out.view(query.shape)

    def keep(self, rows: Sequence[int]) -> None:
        """Make these rows of the last forward, in this order, tokens of the text."""
        self.move(self.end, rows)
        self.length += len(rows)
        if self.end > self.shape.kept_tokens:
            self._drop_oldest()

    def move(self, end: int, rows: Sequence[int]) -> None:
        """Move `rows`, counted from index `end`, in this order to `end` and the places after it."""
        count = len(rows)
        if list(rows) != list(range(count)):
            kept = self.rows[:, :, :, end + put(list(rows), self.rows.device)]
            self.rows[:, :, :, end : end + count] = kept

    def want(self, length: int) -> None:
        """Ask for a mark at this length, the current one or a longer one, before its window leaves
        the device.
        """
        if length not in self._wanted:
            self._wanted.append(length)

    def begin_fill(self) -> None:
        """Prepare for `fill`: leave a mark at the current length, because rows will be replaced."""
        if self.length and not self.marks.has(self.length):
            self.marks.add(self.mark())
        self._whole = False

    def fill(self, layer: int, keys_values: torch.Tensor) -> None:
        """Store the last tokens of a layer, [2, kv_heads, tokens, head_dim], between `begin_fill`
        and `commit_fill`.
        """
        self.rows[layer, :, :, : keys_values.shape[2]] = keys_values

    def commit_fill(self, length: int, held: int) -> None:
        """Set the length after `fill` of every layer with `held` tokens."""
        self.length, self.start, self._whole = length, length - held, True
        self._prune_wanted()

    def mark(self) -> Mark:
        """Return a copy of the windows at the current length, on the host."""
        return self._mark_at(self.length, self.end)

    def reachable(self, tokens: int) -> int:
        """Return the greatest length up to `tokens` to which the text can be cut."""
        best = self.marks.best(tokens, self.shape.past)
        return max(self._reaches(tokens), best[0] if best else 0)

    def roll_back(self, tokens: int) -> None:
        """Cut the text to its first `tokens` tokens. Raises RuntimeError if that is no length that
        `reachable` returns.
        """
        if not tokens:
            self.commit_fill(0, 0)
        elif self._reaches(tokens) != tokens:
            best = self.marks.best(tokens, self.shape.past)
            if best is None or best[0] != tokens:
                raise RuntimeError(f"windows of {self.length} tokens cannot be cut to {tokens}")
            self.take(best[1])
        self.length = tokens
        self.marks.cut(tokens)
        self._wanted = [length for length in self._wanted if length <= tokens]

    def take(self, mark: Mark) -> None:
        """Replace the windows by those of a mark."""
        held = mark.rows.shape[3]
        for layer, rows in zip(self.rows, mark.rows, strict=True):
            layer[:, :, :held] = rows.to(layer.device)
        self.commit_fill(mark.length, held)

    @property
    def saved_lengths(self) -> list[int]:
        """Lengths of all marks, and last the current one."""
        return [*(mark.length for mark in self.marks if mark.length != self.length), self.length]

    def saved(self, index: int) -> Mark:
        """Return the windows at one of `saved_lengths`."""
        length = self.saved_lengths[index]
        if length == self.length:
            return self.mark()
        return next(mark for mark in self.marks if mark.length == length)

    def restore(self, marks: Sequence[Mark]) -> None:
        """Take windows that were `saved`, the last of which are those of the text's length."""
        self.take(marks[-1])
        self.marks.replace(marks[:-1])

    def close(self) -> None:
        """Free the memory."""
        self._memory.free(self._allocation)
        self.marks.replace([])
        del self.rows

    def _reaches(self, tokens: int) -> int:
        """Return the greatest length up to `tokens` that the windows themselves reach, or 0."""
        if not self._whole:
            return 0
        return reaches(self.start, self.length, tokens, self.shape.past) or 0

    def _drop_oldest(self) -> None:
        """Drop all but the last tokens, after copying the marks that they belong to."""
        held = self.shape.held
        start = self.length - held
        for length in self._wanted:
            if reaches(start, self.length, length, self.shape.past) != length:
                self.marks.add(self._mark_at(length, held))
        for layer in self.rows:
            # Cloned, because the two ranges may overlap.
            layer[:, :, :held] = layer[:, :, self.end - held : self.end].clone()
        self.start = start
        self._prune_wanted()

    def _prune_wanted(self) -> None:
        """Forget the wanted lengths whose windows are not held any more."""
        self._wanted = [length for length in self._wanted if self._reaches(length) == length]

    def _mark_at(self, length: int, most: int) -> Mark:
        """Return a copy of at most `most` rows up to a length, on the host. The device makes a copy
        of one layer at a time.
        """
        end = length - self.start
        first = max(0, end - most)
        rows = torch.empty(self.shape.rows_shape(end - first), dtype=self.shape.dtype)
        for to, layer in zip(rows, self.rows, strict=True):
            to.copy_(layer[:, :, first:end])
        return Mark(length, rows)
