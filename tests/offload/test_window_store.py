"""The store of windows alone: whatever is filled, kept and cut, it holds the tokens that it says,
and so do its marks. Keys and values are the positions of their tokens.
"""

from __future__ import annotations

import random

import pytest
import torch

from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.recent.marks import MOST_MARKS, Mark, Marks
from triforce_offload.kv.windows.prefill import WindowPrefill
from triforce_offload.kv.windows.shape import WindowShape
from triforce_offload.kv.windows.store import WindowStore
from triforce_offload.memory.device import DeviceMemory

CPU = torch.device("cpu")
PASS = 16
SHAPE = WindowShape(2, 1, 2, 24, torch.float32, 10_000)


def forward(store: WindowStore, rows: int) -> ForwardBatch:
    """A forward over the next tokens, which rotates nothing."""
    batch = ForwardBatch.text(torch.zeros(rows, dtype=torch.int64), store.length, CPU)
    rotation = torch.ones(rows, 2), torch.zeros(rows, 2)
    return ForwardBatch(batch.tokens, batch.positions, rotation=rotation)


def numbered(batch: ForwardBatch) -> torch.Tensor:
    """Queries of 0, and keys and values of the rows' positions: [rows, 3, 2]."""
    numbers = batch.positions.float()[:, None, None].repeat(1, 3, 2)
    numbers[:, 0] = 0
    return numbers


def prefill(store: WindowStore, tokens: int, *, layers: int = 2, part: int = 40) -> None:
    """A prefill, which ends after fewer layers as an interrupted one does."""
    whole = forward(store, tokens)
    cache = WindowPrefill(store, tokens)
    for layer in range(layers):
        for each in whole.parts(part):
            seen = cache.attend(layer, numbered(each), each)
            assert torch.allclose(seen[0, :, 0], means(each.positions))
    if layers == 2:
        cache.commit()
    else:
        store.roll_back(store.length)


def means(positions: torch.Tensor) -> torch.Tensor:
    """What a query of 0 sees through the window: the mean of the last positions."""
    first = (positions - SHAPE.past).clamp(min=0)
    return (first + positions) / 2


def run_pass(store: WindowStore, rows: int, kept: int) -> None:
    batch = forward(store, rows)
    for layer in range(2):
        seen = store.attend(layer, numbered(batch), batch, store.end)
        assert torch.allclose(seen[0, :, 0], means(batch.positions))
    store.keep(range(kept))


def check(store: WindowStore) -> None:
    held = [(store.start, store.length, store.rows[:, :, :, : store.end])]
    held += [(mark.start, mark.length, mark.parts[0]) for mark in store.marks]
    for start, length, rows in held:
        expected = torch.arange(start, length).float()[:, None].expand(2, 2, 1, -1, 2)
        assert torch.equal(rows, expected)
        assert min(length, SHAPE.past) <= length - start <= SHAPE.kept_tokens
    lengths = [mark.length for mark in store.marks]
    assert lengths == sorted(set(lengths))
    assert len(lengths) <= MOST_MARKS
    assert len(store._wanted) <= SHAPE.kept_tokens, "what is wanted and gone is forgotten"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(12))
def test_windows_and_marks_hold_the_tokens_that_they_say(seed: int) -> None:
    choose, store = random.Random(seed), WindowStore(SHAPE, PASS, DeviceMemory(CPU, None))
    assert store.rows.shape[3] == SHAPE.capacity(PASS)
    cut = 0
    for _ in range(60):
        tokens = choose.randint(1, 120)
        match choose.choice(("prefill", "prefill", "interrupted", "passes", "passes", "cut")):
            case "prefill":
                prefill(store, tokens)
                store.want(store.length)
            case "interrupted":
                length = store.length
                prefill(store, tokens, layers=choose.randrange(2))
                assert store.length == length
            case "passes":
                for _ in range(tokens):
                    rows = choose.randint(1, PASS)
                    run_pass(store, rows, choose.randint(0, min(rows, 3)))
            case "cut":
                wanted = choose.randint(0, store.length)
                reached = store.reachable(wanted)
                store.roll_back(reached)
                assert store.length == reached <= wanted
                cut += reached > 0
                if wanted > reached:
                    with pytest.raises(RuntimeError, match="cannot be cut"):
                        store.roll_back(wanted)
        check(store)
    assert cut > 0
    store.close()


def test_marks_are_few_and_the_longest_stays() -> None:
    marks = Marks()
    for length in (10, 20, 30, 40, 41, 50, 60, 70, 5):
        marks.add(Mark(length, length - 3, ()))
        assert len(marks) <= MOST_MARKS
    lengths = [mark.length for mark in marks]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 70
    # Of 3 tokens held, 2 must be before a cut.
    assert marks.best(100, 2)[0] == 70
    assert marks.best(69, 2)[0] == 69
    assert marks.best(68, 2)[0] == lengths[-2]
    marks.cut(45)
    assert [mark.length for mark in marks] == [each for each in lengths if each <= 45]
