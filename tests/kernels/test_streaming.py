"""Attention piece by piece against softmax over all keys at once, in float64."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest
import torch
from exactness import DEVICE, INTERPRETED, TOLERANCE, assert_near

from triforce_kernels.attention.scoring import LARGEST, ScoreBuffer
from triforce_kernels.attention.streaming import Running, attend_blocks, attend_cache, attend_tail


class Case(NamedTuple):
    kv_heads: int
    group: int
    tokens: int
    head_dim: int
    block: int
    blocks: int
    tail: int

    @property
    def rows(self) -> int:
        return self.group * self.tokens


CASES = [
    Case(2, 1, 1, 64, 64, 2, 1),  # one token, one past a block
    Case(1, 3, 5, 80, 32, 3, 19),  # MQA
    Case(2, 4, 3, 96, 40, 1, 9),
    Case(1, 7, 2, 128, 128, 2, 2),
    Case(1, 8, 4, 256, 16, 2, 30),
    Case(1, 4, 10, 512, 16, 1, 26),  # more rows than a tile of such heads
    Case(1, 1, 128, 64, 8, 1, 130),  # a whole draft, more rows than a tile
    Case(3, 1, 2, 36, 24, 2, 5),
]
SIZE = 8


def exact(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: int,
    visible: torch.Tensor | None = None,
    cap: float | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp and scores in float64; the last `tokens` keys are the queries' own."""
    scores = query.double() @ keys.double().mT * query.shape[2] ** -0.5
    scores = scores if cap is None else (scores / cap).tanh() * cap
    if visible is None:
        visible = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    hidden = torch.zeros(tokens, keys.shape[1], dtype=torch.bool, device=query.device)
    hidden[:, keys.shape[1] - tokens :] = ~visible
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(keys.shape[1] - tokens - window)
    scores.masked_fill_(hidden.repeat(query.shape[1] // tokens, 1), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0).unsqueeze(-1)).exp()
    return weights @ values.double(), lse, scores


def chunked(x: torch.Tensor, case: Case, filler: float) -> torch.Tensor:
    """[..., keys] by chunks, each block and the tail beginning a new one: [..., chunks, SIZE]."""
    pieces = [*x[..., : case.blocks * case.block].split(case.block, -1)]
    pieces.append(x[..., case.blocks * case.block :])
    pieces = [torch.nn.functional.pad(p, (0, -p.shape[-1] % SIZE), value=filler) for p in pieces]
    return torch.cat(pieces, -1).unflatten(-1, (-1, SIZE))


def run(
    case: Case, query, keys, values, *, scored=False, visible=None, calls=(1,), cap=None, behind=0
):
    """Blocks in calls, then the tail; and the scores, if asked.

    calls: number of blocks in each call before the last, which has the rest
    behind: number of keys behind those of the queries, where only the device knows the end
    """
    many = case.blocks * case.block

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x[:, :many].unflatten(1, (case.blocks, case.block)).transpose(0, 1)

    per = -(-case.block // SIZE)
    chunks = case.blocks * per + -(-case.tail // SIZE)
    buffer = None
    if scored:
        out = torch.empty(case.kv_heads, case.rows, chunks, device=DEVICE)
        buffer = ScoreBuffer(out, 0, SIZE)
    running = Running.of(query, cap)
    done = 0
    for count in (*calls, case.blocks):
        part = slice(done, done + count)
        at = buffer and buffer.at(done * per)
        attend_blocks(running, query, blocks(keys)[part], blocks(values)[part], at)
        done = min(case.blocks, done + count)
    tail, end = buffer and buffer.at(case.blocks * per), None
    if behind:
        other = keys.new_full((case.kv_heads, behind, case.head_dim), 50.0)
        keys, values = (torch.cat((each, other), 1) for each in (keys, values))
        end = torch.tensor([case.tail - case.tokens], device=DEVICE)
    part = attend_tail(
        running,
        query,
        keys[:, many:],
        values[:, many:],
        case.tokens,
        end=end,
        visible=visible,
        scores=tail,
    )
    return part, buffer and buffer.out


def make(case: Case, draw, dtype: torch.dtype):
    keys = case.blocks * case.block + case.tail
    shapes = ((case.rows, case.head_dim), (keys, case.head_dim), (keys, case.head_dim))
    return [draw(case.kv_heads, *shape, dtype=dtype) for shape in shapes]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("case", CASES)
def test_blocks_and_tail_equal_attention_over_all_keys(backend, draw, case: Case, dtype) -> None:
    query, keys, values = make(case, draw, dtype)
    out, lse, _ = exact(query, keys, values, case.tokens)
    part, _ = run(case, query, keys, values)
    assert part.out.dtype == dtype
    assert_near(part.out, out, TOLERANCE[dtype])
    assert_near(part.lse, lse, TOLERANCE[dtype])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("case", [c for c in CASES if c.tail])
def test_a_tail_with_other_keys_behind_it(
    backend, draw, case: Case, dtype, is_tree: bool, cap: float | None
) -> None:
    """As in a recorded pass, where only the device knows the end."""
    query, keys, values = make(case, draw, dtype)
    visible = None
    if is_tree:
        visible = torch.ones(case.tokens, case.tokens, dtype=torch.bool, device=DEVICE).tril()
        visible[1:, 0] = False
    known, _ = run(case, query, keys, values, visible=visible, cap=cap)
    part, _ = run(case, query, keys, values, visible=visible, cap=cap, behind=9)
    assert_near(part.out, known.out.double(), TOLERANCE[dtype])
    assert_near(part.lse, known.lse.double(), TOLERANCE[dtype])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("case", [c for c in CASES if c.block % SIZE == 0])
def test_mass_is_the_softmax_summed_over_each_chunk(backend, draw, case: Case, dtype) -> None:
    query, keys, values = make(case, draw, dtype)
    out, _, scores = exact(query, keys, values, case.tokens)
    part, buffer = run(case, query, keys, values, scored=True)
    assert_near(part.out, out, TOLERANCE[dtype])
    expected = chunked(scores, case, float("-inf")).logsumexp(-1)
    assert_near(buffer, expected, TOLERANCE[torch.float32])
    mass, near = (buffer - part.lse.unsqueeze(-1)).exp(), TOLERANCE[torch.float32]
    assert (mass - chunked(scores.softmax(-1), case, 0).sum(-1)).abs().max() <= near
    assert (mass.sum(-1) - 1).abs().max() <= near


@pytest.mark.parametrize("size", [2, LARGEST])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(1, 5, 13, 64, 32, 2, 20), torch.float16),  # 65 rows
        (Case(1, 2, 2, 64, 32, 1, 9), torch.float32),
        (Case(1, 1, 2, 256, 16, 2, 17), torch.float32),  # the smallest tile
    ],
)
def test_chunks_of_any_size_fit_into_any_tile(
    backend, draw, monkeypatch, case: Case, dtype, size: int
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SIZE", size)
    query, keys, values = make(case, draw, dtype)
    _, _, scores = exact(query, keys, values, case.tokens)
    _, buffer = run(case, query, keys, values, scored=True)
    assert_near(
        buffer, chunked(scores, case, float("-inf")).logsumexp(-1), TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("case", [CASES[1], CASES[3]])
@pytest.mark.parametrize("scored", [False, True])
def test_blocks_together_and_one_by_one_are_bitwise_alike(backend, draw, case, scored) -> None:
    """Resident blocks come together, streamed ones one by one: the text must not tell."""
    query, keys, values = make(case, draw, torch.float16)
    together, buffer = run(case, query, keys, values, scored=scored, calls=())
    one_by_one, other = run(case, query, keys, values, scored=scored, calls=(1,) * case.blocks)
    assert torch.equal(together.out, one_by_one.out)
    assert torch.equal(together.lse, one_by_one.lse)
    if scored:
        assert torch.equal(buffer, other)


# A small tree, and one of as many tokens as `--tree auto` drafts, and the text's last.
TREES = {
    "small": [-1, 0, 0, 1, 1, 2],
    "large": [-1, *(int(17 * row**0.5) % row for row in range(1, 65))],
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dtype", INTERPRETED)
def test_a_tree_of_drafts_sees_its_own_branches(backend, draw, dtype, tree: str) -> None:
    parents = TREES[tree]
    rows = len(parents)
    case = Case(2, 2, rows, 64, 16, 1, rows + 5)
    query, keys, values = make(case, draw, dtype)
    visible = torch.eye(rows, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    visible = visible.to(DEVICE)
    out, lse, scores = exact(query, keys, values, rows, visible)
    part, buffer = run(case, query, keys, values, scored=True, visible=visible)
    assert_near(part.out, out, TOLERANCE[dtype])
    assert_near(part.lse, lse, TOLERANCE[dtype])
    assert_near(
        buffer, chunked(scores, case, float("-inf")).logsumexp(-1), TOLERANCE[torch.float32]
    )
    assert_near(run(case, query, keys, values, visible=visible)[0].out, out, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("window", [None, 3, 30])
def test_some_rows_of_a_tree_attend_to_those_computed_before(
    backend, draw, dtype, window: int | None, on_device: bool
) -> None:
    """The rows of a tree, its last three and five more keys that all of them see as columns."""
    before, rows = 21, 40
    parents = [-1, *(int(17 * row**0.5) % row for row in range(1, rows))]
    visible = torch.eye(rows, dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            visible[row] |= visible[parent]
    query = draw(2, 2 * rows, 64, dtype=dtype)
    keys, values = draw(2, 2, before + rows + 3, 64, dtype=dtype)
    heads = query.view(2, 2, rows, 64)
    for first, end in ((rows - 3, rows), (0, 1), (5, 30)):
        part = heads[:, :, first:end].reshape(2, -1, 64)
        more = torch.ones(end - first, 5, dtype=torch.bool)
        columns = torch.cat((more, visible[first:end, :end]), 1).to(DEVICE)
        place = before + first
        where = torch.tensor([place], device=DEVICE) if on_device else place
        out = attend_cache(
            part, keys, values, end - first, where, window, visible=columns
        ).out.view(2, 2, end - first, 64)
        for row in range(first, end):
            path = torch.cat((torch.arange(before), before + visible[row].nonzero().flatten()))
            path = path[-(window or len(path)) :].to(DEVICE)
            alone = heads[:, :, row].contiguous()
            expected, _, _ = exact(alone, keys[:, path], values[:, path], 1, None)
            assert_near(out[:, :, row - first], expected, TOLERANCE[dtype])


def test_a_query_that_sees_nothing_gives_zeros(backend, draw) -> None:
    case = Case(1, 2, 3, 64, 8, 0, 3)
    query, keys, values = make(case, draw, torch.float32)
    visible = torch.eye(3, dtype=torch.bool, device=DEVICE)
    visible[1] = False
    part, _ = run(case, query, keys, values, visible=visible)
    assert (part.out[:, [1, 4]] == 0).all()
    assert (part.lse[:, [1, 4]] == float("-inf")).all()
    torch.testing.assert_close(part.out[:, [0, 2]], values[:, [0, 2]])


def test_nothing_at_all_and_blocks_without_a_tail(backend, draw) -> None:
    query, keys, values = make(Case(2, 1, 3, 64, 16, 1, 0), draw, torch.float32)
    running = Running.of(query)
    attend_blocks(running, query, keys[None, :, :0], values[None, :, :0])
    attend_blocks(running, query, keys[:0, None].expand(0, 2, 16, 64), values[None][:0])
    empty = attend_tail(running, query, keys[:, :0], values[:, :0], 3)
    assert (empty.out == 0).all()
    assert (empty.lse == float("-inf")).all()
    attend_blocks(running, query, keys[None], values[None])
    part = attend_tail(running, query, keys[:, :0], values[:, :0], 3)
    expected = (query.double() @ keys.double().transpose(1, 2) / 8).softmax(-1) @ values.double()
    assert_near(part.out, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("scored", [False, True])
def test_scores_of_minus_infinity_weigh_nothing(backend, draw, scored) -> None:
    case = Case(1, 2, 2, 64, 16, 2, 8)
    query, keys, values = make(case, draw, torch.float32)
    query.abs_()
    # More than a whole block; but PyTorch's operator on the CPU needs a finite score in each.
    keys[:, 4 if backend == "reference" and not scored else 0 : 20] = float("-inf")
    out, lse, scores = exact(query, keys, values, case.tokens)
    part, buffer = run(case, query, keys, values, scored=scored)
    assert_near(part.out, out, TOLERANCE[torch.float32])
    assert_near(part.lse, lse, TOLERANCE[torch.float32])
    if scored:
        assert_near(
            buffer, chunked(scores, case, float("-inf")).logsumexp(-1), TOLERANCE[torch.float32]
        )


def test_values_and_scores_near_the_greatest_half(backend, draw) -> None:
    case = Case(1, 2, 3, 64, 32, 2, 10)
    query, keys, values = make(case, draw, torch.float16)
    values = (values.sign() * 65000 + values).half()
    query *= 300  # scores in the thousands
    keys *= 30
    assert values.isfinite().all()
    out, lse, _ = exact(query, keys, values, case.tokens)
    part, _ = run(case, query, keys, values, scored=True)
    assert_near(part.out, out, TOLERANCE[torch.float16])
    assert_near(part.lse, lse, TOLERANCE[torch.float32])


@pytest.mark.parametrize("scored", [False, True])
def test_nan_in_a_key_reaches_the_output(backend, draw, scored) -> None:
    """What the emulated link relies on: reading a slot too early cannot go unseen."""
    case = Case(2, 1, 3, 64, 32, 1, 8)
    query, keys, values = make(case, draw, torch.float32)
    keys[1, 17, 0] = float("nan")
    part, _ = run(case, query, keys, values, scored=scored)
    assert part.out[1].isnan().all()
    assert part.out[0].isfinite().all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda q, k, v: (q[:, :, :32], k, v),
        lambda q, k, v: (q, k[:, :, :5], v),
        lambda q, k, v: (q.half(), k, v),
        lambda q, k, v: (q, k.to("meta"), v),
        lambda q, k, v: (q, k.transpose(2, 3).contiguous().transpose(2, 3), v),
        lambda q, k, v: (q[:, :0], k, v),
    ],
)
def test_inputs_that_do_not_fit_are_all_reported(backend, draw, spoil) -> None:
    inputs = spoil(draw(2, 3, 64), draw(1, 2, 16, 64), draw(1, 2, 16, 64))
    running = Running.of(draw(2, 3, 64))
    report = r"query \(.*stride.*torch.* on .*key \(.*value \("
    with pytest.raises(ValueError, match=f"attend_blocks cannot take {report}"):
        attend_blocks(running, *inputs)
    query, keys, values = inputs[0], *(x[0] for x in inputs[1:])
    with pytest.raises(ValueError, match=f"attend_tail cannot take {report}"):
        attend_tail(running, query, keys, values, 3)
    with pytest.raises(ValueError, match=f"attend_cache cannot take {report}"):
        attend_cache(query, keys, values, 3, 13)


def test_a_cache_that_is_too_short_is_refused(backend, draw) -> None:
    query, keys = draw(2, 3, 64), draw(2, 16, 64)
    with pytest.raises(ValueError, match="end 14"):
        attend_cache(query, keys, keys, 3, 14)
    buffer = ScoreBuffer(torch.empty(2, 3, 1, device=DEVICE), 0, 8)
    with pytest.raises(ValueError, match=r"scores \(2, 3, 1\)"):
        attend_blocks(Running.of(query), query, keys[None], keys[None], buffer)
