"""The drafter that costs nothing: what followed the last time the text said the same."""

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

# So many tokens must match.
_LEAST = 2
# So many earlier places are compared, the newest first.
_CANDIDATES = 16
# So many tokens are compared at most: a longer match is no better a guess.
_LONGEST = 64


class NGramDrafter:
    """Looks the text's longest suffix up in prompt and output and proposes what followed it there.

    Kept as LZ77 coders do: for each pair of tokens the newest place where it ends, and for each
    place the one before it with the same pair. A token costs one dictionary entry, a lookup a few
    short comparisons, however long the text.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._newest: dict[tuple[int, int], int] = {}
        self._pairs: list[tuple[int, int]] = []
        self._earlier: list[int] = []

    def propose(self, text: Text, count: int) -> Draft:
        """At most `count` tokens, none if nothing matches. Their distributions are one-hot."""
        self._index(text)
        return Draft(put(self._lookup(text.tokens, count) if count else [], self._device))

    def branch(self, text: Text, growth: Growth, nodes: int, deepest: int) -> Draft:
        """Brancher.branch: what followed in several places, those that say the same as one branch.
        Their tokens are sure.
        """
        self._index(text)
        places = list(self._places(text.tokens))
        return trie(text.tokens, places, growth, nodes, deepest).draft(self._device)

    def proposer(self, params: SamplingParams, rule: Rule) -> Brancher:
        """Drafter.proposer: what is looked up depends on the text alone."""
        return self

    def roll_back(self, tokens: int) -> None:
        """Drafter.roll_back. What follows the last token that holds is not known yet."""
        while len(self._pairs) > max(0, tokens - 1):
            pair, earlier = self._pairs.pop(), self._earlier.pop()
            if earlier < 0:
                del self._newest[pair]
            else:
                self._newest[pair] = earlier

    def give_up_recorded(self) -> bool:
        """Drafter.give_up_recorded."""
        return False

    def close(self) -> None:
        self.roll_back(0)

    def _index(self, text: Text) -> None:
        """Takes in the places up to, and without, the last committed token: what follows it is
        not known yet.
        """
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
        # Past the end of what is known a text that repeats goes on with what was just proposed.
        proposed = tokens[best + 1 : best + 1 + count]
        period = len(proposed)
        while len(proposed) < count:
            proposed.append(proposed[len(proposed) - period])
        return proposed

    def _places(self, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """Earlier places, the newest first, that end as the text does, and for how many tokens."""
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
    """How many tokens before and at `place` equal those before and at `last`."""
    length = 0
    while length < min(_LONGEST, place + 1) and tokens[place - length] == tokens[last - length]:
        length += 1
    return length
