"""The drafter that runs a draft model over a window: attention sinks and recent tokens."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Protocol

import torch
import torch.nn.functional as F

from triforce_core.decoding.acceptance import Draft, Rule
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import distributions
from triforce_core.decoding.drafters.resident import ResidentModel
from triforce_core.decoding.levels import Brancher, check_token
from triforce_core.decoding.trees.growing import Candidate, Tree, younger
from triforce_core.decoding.trees.growth import Growth
from triforce_core.model.rope import Rope
from triforce_core.params import SamplingParams
from triforce_core.plan.levels import SINKS, WINDOW
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.shape import KVShape
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import DeviceMemory, put

# Number of likeliest tokens of a row that may become its children.
_WIDEST = 32


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
        rows[:, 1, :, self.sinks : end] = rest[:, 1]
        self.kv.end = end

    def close(self) -> None:
        self.kv.close()


class SmallModelDrafter:
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
        return _SmallModelProposer(self, params, rule)

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
        """Run a tree after the tokens run so far, and keep none of its KV. Return the logits after
        the given rows, [rows, vocab].
        """
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


class ModelDrafter(Protocol):
    """A model that drafts token by token.

    device: device that computes
    most: number of tokens of the longest draft
    """

    device: torch.device
    most: int

    def catch_up(self, text: Text, count: int) -> torch.Tensor | None:
        """Prepare for a draft of `count` tokens. Return the tokens of the text that must run first;
        None if nothing can be drafted now.
        """

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run tokens [n] after those run so far. Return the logits after the last, [1, vocab]."""

    def have_drawn(self, tokens: torch.Tensor) -> None:
        """Note the tokens [n] that were drawn, and run, since `catch_up`."""


class ModelProposer:
    """A proposer for one request: one forward per token, without waiting for the device."""

    def __init__(self, drafter: ModelDrafter, params: SamplingParams, rule: Rule) -> None:
        self._drafter = drafter
        self._params = params
        self._rule = rule

    def propose(self, text: Text, count: int) -> Draft:
        """Propose at most `count` tokens; -1 where the draft model's logits are not finite."""
        drafter = self._drafter
        count = min(count, drafter.most)
        tokens: list[torch.Tensor] = []
        drawn_from: list[torch.Tensor] = []
        batch = drafter.catch_up(text, count) if count else None
        for i in range(count if batch is not None else 0):
            # A distribution that contains NaN gives -1, which the verifier detects.
            before = torch.cat(tokens).clamp_(min=0) if tokens else None
            drawn_from.append(distributions(drafter.forward(batch), self._params, text, before))
            tokens.append(self._rule.draw(drawn_from[-1], len(text.tokens) + i))
            batch = tokens[-1].clamp(min=0)
        if not tokens:
            return Draft(put([], drafter.device))
        drawn = torch.cat(tokens)
        # All but the last were run.
        drafter.have_drawn(drawn[:-1])
        return Draft(drawn, torch.cat(drawn_from))


class _SmallModelProposer(ModelProposer):
    """The proposer of a draft model, which also drafts trees."""

    _drafter: SmallModelDrafter

    def branch(self, text: Text, growth: Growth, nodes: int, deepest: int) -> Draft:
        """Brancher.branch, level by level: each takes one forward over the whole tree and one wait.

        Raises CheckpointError if a distribution contains NaN.
        """
        drafter, tree, drawn_from = self._drafter, Tree(), []
        nodes = min(nodes, drafter.most)
        logits, rows = drafter.forward(drafter.catch_up(text, nodes)), [0]
        for depth in range(deepest):
            below = len(tree)
            self._grow(tree, rows, logits, growth, nodes, len(text.tokens) + depth, drawn_from)
            rows = [
                row for row in range(below + 1, len(tree) + 1) if growth.may_bear(tree.values[row])
            ]
            if not rows or len(tree) == nodes or depth + 1 == deepest:
                break
            if not growth.is_worth_a_level([tree.values[row] for row in rows]):
                break
            logits = drafter.forward_tree(tree, rows)
        growth.grew(len(tree))
        return tree.draft(drafter.device, drawn_from)

    def _grow(
        self,
        tree: Tree,
        rows: Sequence[int],
        logits: torch.Tensor,
        growth: Growth,
        nodes: int,
        position: int,
        drawn_from: list[torch.Tensor],
    ) -> None:
        """Add children to rows of equal depth in a tree.

        logits: logits after the rows, [rows, vocab]
        position: index in the sequence of the children
        """
        # Probabilities at temperature 1, because a request's distribution may have a single token.
        best = logits.log_softmax(-1).topk(min(_WIDEST, logits.shape[-1]))
        likely = come(best.values.exp()).tolist()
        tokens = best.indices.tolist()
        check_token(-1 if any(isnan(row[0]) for row in likely) else 0)
        # Decide which rows get a first child before it is drawn: another choice would add bias.
        firsts = []
        for i, row in enumerate(rows):
            chance = growth.chance(0, likely[i][0])
            if (value := tree.values[row] * chance) >= growth.level_least:
                firsts.append((value, -i))
        firsts = sorted(firsts, reverse=True)[: nodes - len(tree)]
        if not firsts:
            return
        chosen = [-i for _, i in firsts]
        probs = distributions(logits[put(chosen, logits.device)], self._params)
        places = torch.full((len(chosen),), position, device=logits.device)
        drawn = come(self._rule.draw(probs, places)).tolist()
        check_token(min(drawn))
        # The token of a one-hot distribution was certain to be proposed.
        has_law = self._params.temperature > 0
        if has_law:
            drawn_from.append(probs)
        later: list[Candidate] = []
        for (value, _), i, token in zip(firsts, chosen, drawn, strict=True):
            row = rows[i]
            tree.add(row, token, value, likely[i][0], drawn=has_law)
            others = [pair for pair in zip(tokens[i], likely[i], strict=True) if pair[0] != token]
            rest = 1 - dict(zip(tokens[i], likely[i], strict=True)).get(token, 0.0)
            later += younger(growth, tree.values[row] - value, row, rest, others)
        # The sort is stable, so no child comes before an elder sibling of equal value.
        later.sort(key=lambda candidate: -candidate.value)
        for candidate in later[: nodes - len(tree)]:
            tree.add(candidate.parent, candidate.token, candidate.value, candidate.sure)
