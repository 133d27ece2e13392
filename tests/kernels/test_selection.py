"""Which chunks are in, against a sort written out; and that those that stay, stay."""

from __future__ import annotations

import pytest
import torch
from exactness import DEVICE

from triforce_kernels.kv.selection import choose_chunks


def chosen(scores: list[float], chunks: int, slots: int, newest: int) -> set[int]:
    """The first, the newest, and the best of the others; of equals the earlier ones."""

    def worth(chunk: int) -> float:
        if chunk == 0 or chunk >= chunks - newest:
            return float("inf")
        return float("-inf") if scores[chunk] != scores[chunk] else scores[chunk]

    return set(sorted(range(chunks), key=lambda c: (-worth(c), c))[:slots])


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("chunks", "slots", "newest"), [(40, 16, 4), (9, 16, 4), (5000, 32, 2), (3, 3, 0), (70, 2, 1)]
)
def test_the_best_chunks_are_in_and_those_that_stay_keep_their_slots(
    backend, draw, chunks, slots, newest
) -> None:
    chunk_of = torch.full((2, 2, slots), -1, device=DEVICE)
    for step in range(3):
        count = max(1, chunks - 2 + step)
        scores = draw(2, 2, chunks + 3)
        if step == 1:
            scores = scores.round()  # many ties, zeros of both signs among them
        scores[0, 0, 5 % chunks] = float("nan")
        scores[1, 1, : chunks // 3] = float("-inf")
        before = chunk_of.clone()
        moves = choose_chunks(scores, chunk_of, count, newest)
        for row in ((i, j) for i in range(2) for j in range(2)):
            filled = min(slots, count)
            now = chunk_of[row].tolist()
            expected = chosen(scores[row].tolist(), count, slots, newest)
            assert set(now[:filled]) == expected
            assert len(expected) == filled
            assert now[filled:] == [-1] * (slots - filled)
            for slot, (old, new, move) in enumerate(
                zip(before[row].tolist(), now, moves[row].tolist(), strict=True)
            ):
                stays = old in expected
                assert move == (-1 if stays or slot >= filled else new)
                assert new == old or not stays


def test_what_does_not_fit_is_reported(backend, draw) -> None:
    chunk_of = torch.full((1, 2, 4), -1, device=DEVICE)
    with pytest.raises(ValueError, match=r"choose_chunks cannot take .*chunks 9, newest 1"):
        choose_chunks(draw(1, 2, 8), chunk_of, 9, 1)
    with pytest.raises(ValueError, match="newest 4"):
        choose_chunks(draw(1, 2, 8), chunk_of, 8, 4)
