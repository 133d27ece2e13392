"""The drafter that costs nothing: what followed the last time the text said the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from offload.memory.device import put
from triforce_core.decoding.acceptance import Draft
from triforce_core.decoding.levels import Text

_LEAST = 2
"""Tokens that must match."""
_CANDIDATES = 16
"""Earlier places that are compared, the newest first."""
_LONGEST = 64
"""Tokens compared at most: a longer match is no better a guess."""


class NGramDrafter:
    """Looks the text's longest suffix up in prompt and output and proposes what followed it there.

    Kept as LZ77 coders do: for each pair of tokens the newest place where it ends, and for each
    place the one before it with the same pair. A token costs one dictionary entry, a lookup a few
    short comparisons, however long the text.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._newest: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []

    def propose(self, text: Text, count: int) -> Draft:
        """At most `count` tokens, none if nothing matches. Their laws are one-hot."""
        self._index(text)
        tokens = self._lookup(text.tokens, count) if count else []
        drawn = put(tokens, self._device)
        return Draft(drawn, F.one_hot(drawn, self._vocab).float())

    def _index(self, text: Text) -> None:
        """Takes in the places up to, and without, the last committed token: what follows it is
        not known yet.
        """
        tokens, earlier = text.tokens, self._earlier
        for end in range(len(earlier), text.committed - 1):
            pair = (tokens[end - 1] if end else -1, tokens[end])
            earlier.append(self._newest.get(pair, -1))
            self._newest[pair] = end

    def _lookup(self, tokens: list[int], count: int) -> list[int]:
        if len(tokens) < _LEAST:
            return []
        last = len(tokens) - 1
        best, best_length = -1, 0
        place = self._newest.get((tokens[-2], tokens[-1]), -1)
        for _ in range(_CANDIDATES):
            if place < 0:
                break
            if (length := _match(tokens, place, last)) > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        if best < 0:
            return []
        # Past the end of what is known a text that repeats goes on with what was just proposed.
        found = tokens[best + 1 : best + 1 + count]
        period = len(found)
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


def _match(tokens: list[int], place: int, last: int) -> int:
    """How many tokens before and at `place` equal those before and at `last`."""
    length = 0
    while length < min(_LONGEST, place + 1) and tokens[place - length] == tokens[last - length]:
        length += 1
    return length
