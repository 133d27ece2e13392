"""A row's bits do not depend on the rows beside it, nor on the pieces in which keys come (B2)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from exactness import DEVICE
from test_experts import formats

from triforce_kernels import dispatch
from triforce_kernels.attention import streaming_triton
from triforce_kernels.attention.attention import Partial
from triforce_kernels.attention.scoring import ScoreBuffer
from triforce_kernels.attention.streaming import Running, attend_blocks, attend_cache, attend_tail
from triforce_kernels.attention.text import attend_text
from triforce_kernels.dispatch import HOST, TRITON
from triforce_kernels.experts.grouped import Experts, gated_experts
from triforce_kernels.host.library import library
from triforce_kernels.layer import clamped_swiglu, geglu, swiglu
from triforce_kernels.limits import FEW_ROWS, WHOLE_ROWS
from triforce_kernels.same_bits import same_bits
from triforce_kernels.weights.linear import StackedWeight, linear

BACKENDS = [TRITON, *([HOST] if library() and DEVICE.type == "cpu" else [])]
# On a GPU, also what the interpreter does not compute rightly, nor quickly.
DTYPES = (torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow))
if DEVICE.type == "cuda":
    DTYPES = (torch.float16, torch.float32, torch.bfloat16)
# It has many exceptions here, which take the interpreter long.
SPLIT = pytest.param("split", marks=pytest.mark.slow)
KV_HEADS, GROUP, HEAD_DIM = 2, 2, 64
KEYS, TOKENS = 341, 70


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == TRITON:
        pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "_forced", request.param)
    with same_bits(wanted=True):
        yield request.param


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class Text:
    """The queries of the last tokens of a text, and all of its keys and values."""

    def __init__(self, draw, dtype: torch.dtype) -> None:
        self.queries = draw(KV_HEADS, GROUP, TOKENS, HEAD_DIM, dtype=dtype)
        self.keys = draw(KV_HEADS, KEYS, HEAD_DIM, dtype=dtype)
        self.values = draw(KV_HEADS, KEYS, HEAD_DIM, dtype=dtype)

    def rows(self, first: int, end: int) -> torch.Tensor:
        return self.queries[:, :, first:end].reshape(KV_HEADS, -1, HEAD_DIM)

    def alone(self, window: int | None = None) -> Partial:
        """The attention of each token by itself."""
        parts = [self.cached(token, token + 1, window) for token in range(TOKENS)]
        return Partial(*(torch.cat(each, 2) for each in zip(*parts, strict=True)))

    def cached(self, first: int, end: int, window: int | None = None, hidden: int = 0) -> Partial:
        """The attention of some tokens to a cache that begins after `hidden` keys."""
        seen = KEYS - TOKENS + end
        keys, values = (each[:, hidden:seen] for each in (self.keys, self.values))
        query, count = self.rows(first, end), end - first
        part = attend_cache(query, keys, values, count, seen - count - hidden, window, first=hidden)
        return _unpacked(part)

    def in_pieces(
        self, first: int, end: int, blocks: tuple[int, ...], *, scored: bool = False
    ) -> Partial:
        """The same over blocks of these sizes, which come one by one, and a tail."""
        seen, query = KEYS - TOKENS + end, self.rows(first, end)
        running, scores = Running.of(query), None
        if scored:
            out = torch.empty(*query.shape[:2], KEYS, device=DEVICE)
            scores = ScoreBuffer(out, 0, 8)
        for begins, size in zip(accumulate(blocks, initial=0), blocks, strict=False):
            piece = slice(begins, begins + size)
            keys, values = self.keys[None, :, piece], self.values[None, :, piece]
            attend_blocks(running, query, keys, values, scores)
        tail = slice(sum(blocks), seen)
        keys, values = self.keys[:, tail], self.values[:, tail]
        return _unpacked(attend_tail(running, query, keys, values, end - first, scores=scores))


def _unpacked(part: Partial) -> Partial:
    """By tokens: [kv_heads, group, tokens, ...]."""
    return Partial(part.out.unflatten(1, (GROUP, -1)), part.lse.unflatten(1, (GROUP, -1)))


def assert_same(ours: Partial, expected: Partial, first: int, end: int) -> None:
    assert torch.equal(ours.out, expected.out[:, :, first:end])
    assert torch.equal(ours.lse, expected.lse[:, :, first:end])


@pytest.mark.one_in(3)
def test_attention_to_blocks_and_caches(draw, whole, dtype) -> None:
    text = Text(draw, dtype)
    expected = text.alone()
    assert expected.out.isfinite().all()
    for first, end in ((0, 1), (3, 8), (5, 70))[: 3 if whole else 2]:
        assert_same(text.cached(first, end), expected, first, end)
        for blocks in ((), (64,), (64,) * 4, (128, 128), (256,)):
            assert_same(text.in_pieces(first, end, blocks), expected, first, end)
        assert_same(text.in_pieces(first, end, (64, 64), scored=True), expected, first, end)


@pytest.mark.one_in(99)
@pytest.mark.parametrize("window", [1, 50, 100])
def test_attention_through_a_window(draw, dtype, window: int) -> None:
    text = Text(draw, dtype)
    expected = text.alone(window)
    for first, end, hidden in ((0, 1, 171), (3, 8, 0), (3, 8, 130), (0, 70, 0), (0, 70, 171)):
        assert_same(text.cached(first, end, window, hidden), expected, first, end)


def _tree(paths: list[list[int]]) -> torch.Tensor:
    """Which rows each row of a tree sees, [rows, rows]. paths: rows of each row's path"""
    visible = torch.zeros(len(paths), len(paths), dtype=torch.bool, device=DEVICE)
    for row, path in enumerate(paths):
        visible[row, path] = True
    return visible


# Every third row goes on with the text, as in a tree with two other children of each.
CHAIN = list(range(2, 30, 3))
PATHS = [[*(each for each in CHAIN if each < row), row] for row in range(30)]


@pytest.mark.one_in(99)
@pytest.mark.parametrize("window", [5, None, 100])
def test_attention_of_a_tree(draw, dtype, window: int | None) -> None:
    """Its rows that continue the text, in a cache and in a tail."""
    text = Text(draw, dtype)
    expected = text.alone(window)
    queries, whole = draw(KV_HEADS, GROUP, 30, HEAD_DIM, dtype=dtype), []
    queries[:, :, CHAIN] = text.queries[:, :, :10]
    before = KEYS - TOKENS
    for each in (text.keys, text.values):
        drafted = draw(KV_HEADS, 30, HEAD_DIM, dtype=dtype)
        drafted[:, CHAIN] = each[:, before : before + 10]
        whole.append(torch.cat((each[:, :before], drafted), 1))
    query, visible = queries.flatten(1, 2), _tree(PATHS)
    part = _unpacked(attend_cache(query, *whole, 30, before, window, visible=visible))
    assert torch.equal(part.out[:, :, CHAIN], expected.out[:, :, :10])
    if window is None:
        running = Running.of(query)
        attend_blocks(running, query, *(each[None, :, :192] for each in whole))
        tail = [each[:, 192:] for each in whole]
        part = _unpacked(attend_tail(running, query, *tail, 30, visible=visible))
        assert torch.equal(part.out[:, :, CHAIN], expected.out[:, :, :10])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("window", [None, 100])
def test_attention_of_a_prompt(draw, dtype, monkeypatch, window: int | None) -> None:
    """Without a state of splits, too."""
    text = Text(draw, dtype)
    expected = text.alone(window)
    queries = text.queries.flatten(0, 1)
    for most in (WHOLE_ROWS, 0):
        monkeypatch.setattr(streaming_triton, "WHOLE_ROWS", most)
        part = attend_text(queries, text.keys, text.values, window)
        shape = (KV_HEADS, GROUP, TOKENS)
        ours = Partial(part.out.view(*shape, HEAD_DIM), part.lse.view(shape))
        assert_same(ours, expected, 0, TOKENS)


def _matrices(draw, rows: int, columns: int, dtype: torch.dtype) -> dict:
    found = formats(draw, rows, columns, dtype)
    found["stacked"] = StackedWeight((found["int4"], found["dense"]))
    return found


@pytest.mark.parametrize("kind", ["dense", "int4", "int3", SPLIT, "high", "blocks", "stacked"])
def test_products(draw, dtype, kind: str) -> None:
    columns, depth = 48, 320
    weight = _matrices(draw, columns, depth, dtype)[kind]
    x, bias = draw(2 * FEW_ROWS + 9, depth, dtype=dtype), draw(weight.shape[0], dtype=dtype)
    whole = linear(x, weight, bias)
    assert whole.isfinite().all()
    for first, end in ((0, 1), (7, 8), (3, 20), (50, 115), (130, 137)):
        assert torch.equal(linear(x[first:end], weight, bias), whole[first:end]), (first, end)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["dense", "int4", "blocks"])
def test_experts(draw, kind: str) -> None:
    dtype, count, width, hidden, rows = torch.float16, 5, 32, 64, FEW_ROWS + 7
    made = (
        formats(draw, count * n, m, dtype)[kind] for n, m in ((2 * width, hidden), (hidden, width))
    )
    experts = Experts(count, *made)
    x = draw(rows, hidden, dtype=dtype)
    chosen = draw(rows, count).topk(2).indices
    weights = draw(rows, 2).softmax(1)
    whole = gated_experts(x, experts, chosen, weights, swiglu)
    for first, end in ((0, 1), (6, 7), (3, 30), (1, 70)):
        part = (each[first:end].contiguous() for each in (chosen, weights))
        assert torch.equal(gated_experts(x[first:end], experts, *part, swiglu), whole[first:end])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", [swiglu, geglu, clamped_swiglu])
@pytest.mark.parametrize("kind", ["dense", "blocks"])
def test_experts_in_one_call(draw, backend: str, kind: str, activation, biased: bool) -> None:
    """A processor computes few float32 rows by one call, and many by one expert after another."""
    if backend != HOST:
        pytest.skip("only a processor has this call")
    count, width, hidden, rows = 5, 32, 64, FEW_ROWS + 7
    made = (
        formats(draw, count * n, m, torch.float32)[kind]
        for n, m in ((2 * width, hidden), (hidden, width))
    )
    biases = (draw(count, 2 * width), draw(count, hidden)) if biased else None
    experts = Experts(count, *made, biases)
    x, weights = draw(rows, hidden), draw(rows, 2).softmax(1)
    chosen = draw(rows, count).topk(2).indices
    whole = gated_experts(x, experts, chosen, weights, activation)
    for first, end in ((0, 1), (6, 7), (3, 30), (1, 65)):
        part = (each[first:end] for each in (chosen, weights))
        found = gated_experts(x[first:end], experts, *part, activation)
        assert torch.equal(found, whole[first:end])


def _later(own):
    """Tiles that are counted from the first key of the piece that a kernel is given."""

    def launch(*values, **named):
        return own(*values, **{**named, "number": 0})

    return launch


def test_planted_faults_are_noticed(draw, monkeypatch, backend: str) -> None:
    if backend != TRITON:
        pytest.skip("faults of this kind are planted in core/decoding/test_same_bits.py")
    text = Text(draw, torch.float16)
    expected = text.alone()
    monkeypatch.setattr(streaming_triton, "_launch", _later(streaming_triton._launch))
    ours = text.in_pieces(3, 8, (64,))
    assert not torch.equal(ours.out, expected.out[:, :, 3:8])
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "_forced", backend)
    with same_bits(wanted=False):
        other = text.cached(5, 70)
    assert not torch.equal(other.out, expected.out[:, :, 5:70])
