"""The drafter that runs a draft model over a window: attention sinks and recent tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.drafters.model_proposer import ModelDrafter, ModelProposer
from triforce_core.decoding.drafters.resident import ResidentModel
from triforce_core.decoding.levels import Brancher
from triforce_core.decoding.trees.growing import Tree
from triforce_core.model.rope import Rope
from triforce_core.params import SamplingParams
from triforce_core.plan.levels import SINKS, WINDOW
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.shape import KVShape
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import DeviceMemory, put


class WindowCache:
    """KV of the first and the recent tokens of a text (StreamingLLM, Xiao et al., 2024).

    Positions are relative to the cache, so a model can draft for contexts far longer than those it
    was trained on. When the cache is full, the oldest tokens after the sinks are dropped, and the
    keys after them are rotated back to their new positions.

    capacity: number of tokens that the cache has room for
    """

    def __init__(self, shape: KVShape, rope: Rope, capacity: int, memory: DeviceMemory) -> None:
        """Raises DoesNotFitError."""
        self.kv = DenseKV(shape, capacity, memory, "drafter cache")
        self.capacity = capacity
        self.sinks = min(SINKS, capacity // 4)
        self._rope = rope

    def keep_recent(self, tokens: int) -> None:
        """Make room: of the tokens after the sinks, keep only the last `tokens`."""
        length, end, rows = self.kv.end, self.sinks + tokens, self.kv.rows
        rest = rows[:, :, :, length - tokens : length].clone()
        rows[:, 0, :, self.sinks : end] = self._rope.turned_back(rest[:, 0], length - end)
        if rows.shape[1] > 1:
            rows[:, 1, :, self.sinks : end] = rest[:, 1]
        self.kv.end = end

    def close(self) -> None:
        self.kv.close()


class SmallModelDrafter(ModelDrafter):
    """A draft model and its window on a text.

    The drafter remembers the tokens it has run, and compares them with the text at every call. So
    the cache follows whatever the levels above accept or reject.
    """

    def __init__(self, model: ResidentModel, cache: WindowCache, vocab: int) -> None:
        """model: forwards over the cache
        vocab: vocabulary size of the target; the tokens are the same, but either model may pad its
            vocabulary
        """
        self.vocab = vocab
        self._model = model
        self._cache = cache
        self._batch: list[int] = []
        self._sure = 0
        self._drawn: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self._cache.kv.rows.device

    @property
    def most(self) -> int:
        """Number of tokens of the longest draft."""
        return (self._cache.capacity - self._cache.sinks) // 2

    def proposer(self, params: SamplingParams, rule: Rule) -> Brancher:
        """Drafter.proposer."""
        return ModelProposer(self, params, rule)

    def roll_back(self, tokens: int) -> None:
        """Drafter.roll_back."""
        self._sure = min(self._sure, tokens)

    def close(self) -> None:
        self._model.close()
        self._cache.close()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run tokens [n] after those run so far. Return the logits after the last, [1, vocab]."""
        logits = self._model.logits(self._known(tokens), self._cache.kv.end, last=True)
        self._cache.kv.keep(range(tokens.shape[0]))
        return self._of_vocab(logits)

    def forward_tree(self, tree: Tree, rows: Sequence[int]) -> torch.Tensor:
        """ModelDrafter.forward_tree: the whole tree, of whose KV none is kept."""
        parents = [parent - 1 for parent in tree.parents]
        tokens = self._known(put(tree.tokens, self.device))
        batch = ForwardBatch.tree(tokens, self._cache.kv.end, parents, self.device)
        return self._of_vocab(self._model.of_tree(batch, [row - 1 for row in rows]))

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens that the draft model has: its last one in place of the target's padding,
        which a sample or a prompt may contain.
        """
        return tokens.clamp(max=self._model.vocab - 1) if self._model.vocab < self.vocab else tokens

    def _of_vocab(self, logits: torch.Tensor) -> torch.Tensor:
        missing = max(0, self.vocab - logits.shape[-1])
        return F.pad(logits, (0, missing), value=float("-inf"))[..., : self.vocab]

    def have_drawn(self, tokens: torch.Tensor) -> None:
        """Note the tokens [n] that were drawn, and run, since `catch_up`. They are copied to the
        host at the next call, when the levels above have waited for them anyway.
        """
        self._drawn = tokens

    def catch_up(self, text: Text, count: int) -> torch.Tensor:
        """Roll back rejected tokens and make room for a draft of `count` tokens. Return the tokens
        of the text that must run first.
        """
        if self._drawn is not None:
            self._batch += come(self._drawn).tolist()
            self._drawn = None
        held, limit = self._sure, min(len(self._batch), len(text.tokens) - 1)
        while held < limit and self._batch[held] == text.tokens[held]:
            held += 1
        held = min(held, limit)
        cache, new = self._cache, text.tokens[held:]
        cache.kv.end -= len(self._batch) - held
        room = cache.capacity - cache.sinks - count
        if not held or cache.kv.end < cache.sinks or len(new) > max(1, room - WINDOW):
            cache.kv.end = 0
            recent = max(1, min(WINDOW, room))
            if len(text.tokens) > cache.sinks + recent:
                new = text.tokens[: cache.sinks] + text.tokens[-recent:]
            else:
                new = text.tokens
        elif cache.kv.end - cache.sinks + len(new) > room:
            cache.keep_recent(min(WINDOW, room - len(new)))
        self._batch[held:] = text.tokens[held:]
        self._sure = text.committed
        return put(new, self.device)
