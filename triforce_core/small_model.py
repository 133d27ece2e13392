"""The drafter that is a small model with a window: attention sinks and the recent tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from triforce_kernels.attention import partial_attention

from offload.attend import causal_mask
from offload.device import DeviceMemory
from offload.kv import KVShape
from offload.weights import ResidentWeights

from .acceptance import Draft, Rule
from .config import ModelConfig
from .laws import law
from .levels import Nothing, Text
from .model import Model
from .params import SamplingParams
from .rope import Rope

SINKS = 16
WINDOW = 256


def window_tokens(config: ModelConfig, max_draft_tokens: int) -> int:
    """Capacity of a WindowCache: sinks, window, and room to draft and to slide rarely."""
    return min(config.trained_positions, SINKS + WINDOW + 2 * (max_draft_tokens + 1))


class WindowCache:
    """KV of the first tokens of a text and of its recent ones (StreamingLLM, Xiao et al., 2024).

    Positions count inside the cache, so a model may draft for texts far longer than it was trained
    on. When it is full the oldest tokens after the sinks go, and the keys behind them are turned
    back to their new positions.
    """

    def __init__(self, shape: KVShape, rope: Rope, capacity: int, memory: DeviceMemory) -> None:
        """Raises DoesNotFitError."""
        self.length = 0
        self.capacity = capacity
        self.sinks = min(SINKS, capacity // 4)
        self._rope = rope
        self._memory = memory
        self._allocation = memory.allocate(
            shape.token_bytes * shape.layers * capacity, "drafter cache"
        )
        self._kv = self._allocation.bytes.view(shape.dtype).view(
            shape.layers, 2, shape.kv_heads, capacity, shape.head_dim
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """model.Cache.attend over the window; `length` does not change."""
        heads, tokens, head_dim = query.shape
        kv_heads = key.shape[0]
        end = self.length + tokens
        keys, values = self._kv[layer]
        keys[:, self.length : end] = key
        values[:, self.length : end] = value
        rows = query.reshape(kv_heads, heads // kv_heads * tokens, head_dim)
        mask = causal_mask(tokens, end, heads // kv_heads, query)
        out = partial_attention(rows, keys[:, :end], values[:, :end], mask=mask).out
        return out.view(heads, tokens, head_dim)

    def keep_recent(self, tokens: int) -> None:
        """Makes room: of the tokens after the sinks only the last `tokens` stay."""
        end = self.sinks + tokens
        rest = self._kv[:, :, :, self.length - tokens : self.length].clone()
        self._kv[:, 0, :, self.sinks : end] = self._rope.turned_back(rest[:, 0], self.length - end)
        self._kv[:, 1, :, self.sinks : end] = rest[:, 1]
        self.length = end

    def close(self) -> None:
        self._memory.free(self._allocation)
        del self._kv


class SmallModelDrafter:
    """Draws tokens from a small model, one forward each, without waiting for the device.

    What it has fed is kept beside the cache and held against the text at every call, so the cache
    follows whatever was accepted or rejected above.
    """

    def __init__(
        self,
        model: Model,
        weights: ResidentWeights,
        cache: WindowCache,
        vocab: int,
        params: SamplingParams,
        rule: Rule,
        device: torch.device,
    ) -> None:
        """vocab: of the model above, whose tokens are the same; either may be padded longer."""
        self._model = model
        self._weights = weights
        self._cache = cache
        self._vocab = vocab
        self._params = params
        self._rule = rule
        self._device = device
        self._fed: list[int] = []
        self._sure = 0
        self._drawn: torch.Tensor | None = None

    def propose(self, text: Text, count: int) -> Draft:
        """At most `count` tokens with the small model's laws; -1 from a law that is no number."""
        count = min(count, (self._cache.capacity - self._cache.sinks) // 2)
        tokens: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        feed = self._catch_up(text, count) if count else None
        for i in range(count):
            hidden = self._model.forward(feed, self._cache.length, self._weights, self._cache)
            self._cache.length += feed.shape[0]
            laws.append(law(self._logits(hidden[-1:]), self._params))
            tokens.append(self._rule.draw(laws[-1], len(text.tokens) + i))
            feed = tokens[-1].clamp(min=0)
        if not tokens:
            return Nothing(self._vocab, self._device).propose(text, count)
        drawn = torch.cat(tokens)
        # All but the last were fed. Read at the next call: the levels above wait for them anyway.
        self._drawn = drawn[:-1]
        return Draft(drawn, torch.cat(laws))

    def _catch_up(self, text: Text, count: int) -> torch.Tensor:
        """Rolls back what does not hold, makes room, and gives what must be fed first."""
        if self._drawn is not None:
            self._fed += self._drawn.tolist()
            self._drawn = None
        held, limit = self._sure, min(len(self._fed), len(text.tokens) - 1)
        while held < limit and self._fed[held] == text.tokens[held]:
            held += 1
        held = min(held, limit)
        cache, new = self._cache, text.tokens[held:]
        cache.length -= len(self._fed) - held
        room = cache.capacity - cache.sinks - count
        if not held or cache.length < cache.sinks or len(new) > max(1, room - WINDOW):
            cache.length = 0
            recent = max(1, min(WINDOW, room))
            if len(text.tokens) > cache.sinks + recent:
                new = text.tokens[: cache.sinks] + text.tokens[-recent:]
            else:
                new = text.tokens
        elif cache.length - cache.sinks + len(new) > room:
            cache.keep_recent(min(WINDOW, room - len(new)))
        self._fed[held:] = text.tokens[held:]
        self._sure = text.committed
        return torch.tensor(new, device=self._device)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(hidden)
        missing = self._vocab - logits.shape[-1]
        return F.pad(logits, (0, max(0, missing)), value=float("-inf"))[..., : self._vocab]
