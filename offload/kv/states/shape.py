"""The geometry of the states of recurrent layers. Sizes need no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from triforce_offload.kv.recent.marks import MOST_MARKS, Mark, MarkTensor
from triforce_offload.weights.formats import FLOAT32, ElementType, aligned

if TYPE_CHECKING:
    import torch

# Rows are folded into the state this many at a time, at multiples of this many tokens: the state
# then depends on the text alone, and not on how many tokens a pass kept. As many rows before the
# last ones stay, so that a text can be cut by some tokens without a mark.
FOLD_TOKENS = 32
# Most rows of a text that are not folded.
MOST_HELD = 2 * FOLD_TOKENS - 1
# Rows behind those of a pass: recorded forwards of the retrieval level are padded.
_PADDING = 32


@dataclass(frozen=True)
class StateShape:
    """The geometry of what a sequence keeps for its recurrent layers.

    Each layer has the inputs of its short convolution, of the last tokens. Layers with linear
    attention also have a state for each value head, [key_dim, value_dim] in float32, and a key
    and an update for each row that is not folded into it yet.

    kind: name of the store in messages
    channels: number of channels of the convolution
    taps: number of tokens that the convolution sees, a row's own included
    dtype: of the inputs; a torch.dtype where there are tensors
    key_heads, value_heads: numbers of heads; 0 for layers that have a convolution alone
    """

    layers: int
    channels: int
    taps: int
    dtype: ElementType
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    kind: ClassVar[str] = "state"

    @property
    def before(self) -> int:
        """Number of inputs that the first row's convolution sees before its own."""
        return self.taps - 1

    def capacity(self, max_pass_tokens: int) -> int:
        """Rows that a layer has room for: those not folded yet, and the rows of a forward."""
        return MOST_HELD + max_pass_tokens + _PADDING

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all layers."""
        numbers = self.layers * self.value_heads * self.key_dim * self.value_dim
        return numbers * FLOAT32.itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of a row's inputs in all layers."""
        return self.layers * self.channels * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all layers: its inputs, key, update and decay."""
        updates = self.value_heads * (self.value_dim + 1)
        numbers = self.layers * (self.key_heads * self.key_dim + updates)
        return self.input_bytes + numbers * FLOAT32.itemsize

    def device_bytes(self, max_pass_tokens: int) -> int:
        inputs = self.before * self.input_bytes
        rows = self.capacity(max_pass_tokens) * self.row_bytes
        # Each of the five tensors is aligned.
        return aligned(self.state_bytes) + aligned(inputs + rows) + 4 * aligned(1)

    def whole(self, key_heads: int, value_heads: int) -> StateShape:
        """Return the shape with the heads of all ranks; channels count as heads where there are no
        others.
        """
        if not self.value_heads:
            return replace(self, channels=value_heads)
        channels = 2 * key_heads * self.key_dim + value_heads * self.value_dim
        heads = {"key_heads": key_heads, "value_heads": value_heads}
        return replace(self, channels=channels, **heads)

    def mark_tensors(self, held: int) -> dict[str, MarkTensor]:
        """Return the tensors of a mark with `held` rows that are not folded, over all heads."""
        layers, rows = self.layers, held + self.before
        if not self.value_heads:
            return {"inputs": MarkTensor((layers, self.channels, rows), self.dtype, False)}
        keys, values = self.key_heads, self.value_heads
        return {
            "state": MarkTensor((layers, values, self.key_dim, self.value_dim), FLOAT32, False),
            "state_keys": MarkTensor((layers, keys, held, self.key_dim), FLOAT32),
            "state_updates": MarkTensor((layers, values, held, self.value_dim), FLOAT32, False),
            "state_decays": MarkTensor((layers, values, held), FLOAT32, False),
            "key_inputs": MarkTensor((2 * layers, keys, rows, self.key_dim), self.dtype),
            "value_inputs": MarkTensor((layers, values, rows, self.value_dim), self.dtype, False),
        }

    def held_at(self, length: int, tensors: Mapping[str, Sequence[int]]) -> int | None:
        """Return how many rows a saved mark at a length holds, by the shapes of its tensors; None
        if it cannot hold that number.
        """
        held = (tensors["state_keys" if self.value_heads else "inputs"][2:3] or (0,))[0]
        held -= 0 if self.value_heads else self.before
        fits = 0 <= held <= min(length, MOST_HELD) and (length - held) % FOLD_TOKENS == 0
        return held if fits else None

    def by_heads(self, mark: Mark) -> dict[str, torch.Tensor]:
        """Return the tensors of a mark with heads in the second dimension."""
        state, keys, updates, decays, inputs = mark.parts
        if not self.value_heads:
            return {"inputs": inputs.transpose(1, 2)}
        wide = self.key_heads * self.key_dim
        both = inputs[..., : 2 * wide].unflatten(2, (2, self.key_heads, -1))
        values = inputs[..., 2 * wide :].unflatten(2, (self.value_heads, -1))
        return {
            "state": state,
            "state_keys": keys,
            "state_updates": updates,
            "state_decays": decays,
            "key_inputs": both.permute(0, 2, 3, 1, 4).flatten(0, 1),
            "value_inputs": values.transpose(1, 2),
        }

    def mark_of(self, length: int, tensors: Mapping[str, torch.Tensor]) -> Mark:
        """Return the mark of what `by_heads` returned."""
        if not self.value_heads:
            inputs = tensors["inputs"].transpose(1, 2)
            start = length - (inputs.shape[1] - self.before)
            rows = inputs.new_empty(self.layers, 0, length - start, 0).float()
            return Mark(length, start, (rows[:, :, :0], rows, rows, rows.sum(3), inputs))
        start = length - tensors["state_decays"].shape[2]
        keys = tensors["key_inputs"].unflatten(0, (-1, 2)).permute(0, 3, 1, 2, 4).flatten(2)
        values = tensors["value_inputs"].transpose(1, 2).flatten(2)
        names = ("state", "state_keys", "state_updates", "state_decays")
        inputs = keys.new_empty((*keys.shape[:2], keys.shape[2] + values.shape[2]))
        inputs[..., : keys.shape[2]], inputs[..., keys.shape[2] :] = keys, values
        return Mark(length, start, (*(tensors[name] for name in names), inputs))

    @property
    def mark_bytes(self) -> int:
        """Most bytes of a mark."""
        inputs = self.before * self.input_bytes
        return self.state_bytes + inputs + MOST_HELD * self.row_bytes

    def mark_bytes_at(self, length: int) -> int:
        """Most bytes of a mark at a length."""
        return self.mark_bytes

    @property
    def marks_bytes(self) -> int:
        """Most bytes of all marks, in host memory."""
        return MOST_MARKS * self.mark_bytes


class NGramShape(StateShape):
    """The geometry of the inputs of the convolution behind n-gram embeddings: of one layer, with no
    states.
    """

    kind: ClassVar[str] = "ngrams"


def folded_tokens(length: int) -> int:
    """Return how many of a text's first tokens are folded when it has grown to a length."""
    return max(0, length // FOLD_TOKENS - 1) * FOLD_TOKENS
