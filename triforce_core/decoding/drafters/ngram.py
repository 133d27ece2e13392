"""The n-gram drafter, which costs nothing: it proposes what followed an earlier match."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from triforce_core.decoding.acceptance import Draft, Rule
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.levels import Brancher
from triforce_core.decoding.trees.growth import Growth
from triforce_core.decoding.trees.trie import trie
from triforce_core.params import SamplingParams
from triforce_offload.memory.device import put

# Number of tokens that must match.
_LEAST = 2
# Number of earlier places that are compared, newest first.
_CANDIDATES = 16
# Most tokens that are compared: a longer match predicts no better.
_LONGEST = 64


class NGramDrafter:
    """A drafter that looks up the longest matching suffix of the text in the prompt and the output,
    and proposes the tokens that followed it there.

    The index is that of LZ77 coders: for each pair of tokens the newest place where it ends, and
    for each place the previous place of the same pair. A token costs one dictionary entry, and a
    lookup costs a few short comparisons, whatever the length of the text.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._newest: dict[tuple[int, int], int] = {}
        self._pairs: list[tuple[int, int]] = []
        self._earlier: list[int] = []

    def propose(self, text: Text, count: int) -> Draft:
        """Propose at most `count` tokens, none if nothing matches. Distributions are one-hot."""
        self._index(text)
        return Draft(put(self._lookup(text.tokens, count) if count else [], self._device))

    def branch(self, text: Text, growth: Growth, nodes: int, deepest: int) -> Draft:
        """Brancher.branch: a tree of what followed in several places. Its tokens are certain to be
        proposed, not drawn.
        """
        self._index(text)
        places = list(self._places(text.tokens))
        return trie(text.tokens, places, growth, nodes, deepest).draft(self._device)

    def proposer(self, params: SamplingParams, rule: Rule) -> Brancher:
        """Drafter.proposer: the proposals depend on the text alone."""
        return self

    def roll_back(self, tokens: int) -> None:
        """Drafter.roll_back. The last kept token is not indexed: its successor is unknown."""
        while len(self._pairs) > max(0, tokens - 1):
            pair, earlier = self._pairs.pop(), self._earlier.pop()
            if earlier < 0:
                del self._newest[pair]
            else:
                self._newest[pair] = earlier

    def close(self) -> None:
        self.roll_back(0)

    def _index(self, text: Text) -> None:
        """Index the places before the last committed token, whose successor is not known yet."""
        tokens, earlier = text.tokens, self._earlier
        for end in range(len(earlier), text.committed - 1):
            pair = (tokens[end - 1] if end else -1, tokens[end])
            self._pairs.append(pair)
            earlier.append(self._newest.get(pair, -1))
            self._newest[pair] = end

    def _lookup(self, tokens: list[int], count: int) -> list[int]:
        best, best_length = -1, 0
        for place, length in self._places(tokens):
            if length > best_length:
                best, best_length = place, length
        if best < 0:
            return []
        # Past the end of the text, a repeating text continues with the proposed tokens.
        proposed = tokens[best + 1 : best + 1 + count]
        period = len(proposed)
        while len(proposed) < count:
            proposed.append(proposed[len(proposed) - period])
        return proposed

    def _places(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """Yield earlier places that match the end of the text, newest first, each with the number
        of matching tokens.
        """
        if len(tokens) < _LEAST:
            return
        last = len(tokens) - 1
        place = self._newest.get((tokens[-2], tokens[-1]), -1)
        for _ in range(_CANDIDATES):
            if place < 0:
                return
            yield place, _match(tokens, place, last)
            place = self._earlier[place]


def _match(tokens: list[int], place: int, last: int) -> int:
    """Count the tokens up to `place` that equal those up to `last`, at most _LONGEST."""
    length = 0
    while length < min(_LONGEST, place + 1) and tokens[place - length] == tokens[last - length]:
        length += 1
    return length
