"""Sequences of the processor's kernels, and the threads that help."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from triforce_kernels import dispatch, layer
from triforce_kernels.attention.dense import DenseKeys, attend_dense
from triforce_kernels.dispatch import HOST
from triforce_kernels.host.layer import NormKind, Operation
from triforce_kernels.host.library import library
from triforce_kernels.host.sequence import Sequence
from triforce_kernels.weights import integers, split_bf16
from triforce_kernels.weights.high_bits import HighBitsWeight
from triforce_kernels.weights.linear import StackedWeight, Weight, linear

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
HIDDEN, WIDTH, EPS = 192, 320, 1e-5


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_forced", HOST)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(rows: int, columns: int, seed: int) -> dict[str, Weight]:
    dense = numbers(rows, columns, seed=seed)
    split = split_bf16.encode(dense.bfloat16())
    half = rows // 2
    return {
        "float32": dense,
        "bfloat16": dense.bfloat16(),
        "split": split,
        "high bits": HighBitsWeight.of(split),
        "int4": integers.quantise(dense),
        "int3": integers.quantise(dense, bits=3),
        "stacked": StackedWeight((dense[:half].half(), integers.quantise(dense[half:]))),
    }


GATE_UP, DOWN = weights(2 * WIDTH, HIDDEN, 1), weights(HIDDEN, WIDTH, 2)
NORM, BIAS = numbers(HIDDEN, seed=3), numbers(HIDDEN, seed=4)


def mlp(name: str, kind: NormKind, offset: float) -> Sequence:
    """A norm, a gated MLP, and the norm of its output, which is added to the input."""
    calls = Sequence()
    hidden, plain = calls.given(HIDDEN), calls.given(HIDDEN)
    normed, gate_up, gated = calls.own(HIDDEN), calls.own(2 * WIDTH), calls.own(WIDTH)
    out = calls.own(HIDDEN)
    calls.norm(hidden, NORM, normed, kind, offset, EPS)
    calls.product(normed, GATE_UP[name], gate_up)
    calls.gated(gate_up, gated, Operation.SILU)
    calls.product(gated, DOWN[name], out, BIAS)
    calls.norm(out, NORM, hidden, kind, offset, EPS, adds=True)
    calls.product(gated, DOWN[name], plain, BIAS, adds=True, factor=0.3)
    return calls


def expected(
    name: str, kind: NormKind, offset: float, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def norm(rows: torch.Tensor) -> torch.Tensor:
        if kind == NormKind.LAYER:
            return layer.layer_norm(rows, NORM, EPS)
        return layer.rms_norm(rows, NORM, EPS, offset=None if kind == NormKind.RMS else offset)

    out = linear(layer.swiglu(linear(norm(x), GATE_UP[name])), DOWN[name], BIAS)
    return x + norm(out), 1 + out * 0.3


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", GATE_UP)
def test_a_sequence_gives_the_bits_of_its_calls(name: str, threads: int) -> None:
    kinds = (NormKind.RMS, 0.0), (NormKind.RMS_FLOAT32, 1.0), (NormKind.LAYER, 0.0)
    before = torch.get_num_threads()
    for kind, offset in kinds:
        calls = mlp(name, kind, offset)
        for rows in (1, 3, 17, 64):
            x = numbers(rows, HIDDEN, seed=rows)
            wanted, plain_wanted = expected(name, kind, offset, x)
            plain = torch.ones(rows, HIDDEN)
            torch.set_num_threads(threads)
            try:
                assert calls.fits(x, plain)
                calls.run(x, plain)
            finally:
                torch.set_num_threads(before)
            assert torch.equal(x, wanted), (kind, rows)
            assert torch.equal(plain, plain_wanted), (kind, rows)


HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 6, 3, 40, 200
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def attention() -> Sequence:
    calls = Sequence()
    qkv, out = calls.given(QKV), calls.given(HEADS * HEAD_DIM)
    calls.attention(qkv, out, HEADS, KV_HEADS, HEAD_DIM)
    return calls


def tree(rows: int, drafted: int, seed: int) -> torch.Tensor:
    """Which of the last keys the rows of a random tree see."""
    draw = torch.Generator().manual_seed(seed)
    seen = torch.eye(drafted, dtype=torch.bool)
    for row in range(1, drafted):
        parent = int(torch.randint(-1, row, (), generator=draw))
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen[drafted - rows :]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window", [None, 30])
def test_an_attention_has_the_bits_of_its_operations(window: int | None, threads: int) -> None:
    """Chains and trees, one after the other: the same calls serve them all."""
    before = torch.get_num_threads()
    kept = [numbers(KV_HEADS, CAPACITY, HEAD_DIM, seed=seed) for seed in (1, 2)]
    calls = attention()
    cases = (5, 5, 9, True), (7, 7, 0, False), (1, 1, 150, False), (3, 8, 20, True)
    cases = *cases, (64, 64, 100, False), (64, 64, 136, True), (1, 1, 0, False)
    for rows, drafted, start, branches in cases:
        x = numbers(rows, QKV, seed=rows)
        angles = numbers(rows, HEAD_DIM // 2, seed=start).repeat(1, 2)
        rotation = angles.cos(), angles.sin()
        visible = tree(rows, drafted, rows) if branches else None
        wanted, own = (DenseKeys(*(each.clone() for each in kept), start, 16, window) for _ in "12")
        by_operations = attend_dense(
            wanted, x.view(rows, -1, HEAD_DIM), rotation, visible=visible
        ).transpose(0, 1)
        out = torch.full((rows, HEADS * HEAD_DIM), float("nan"))
        torch.set_num_threads(threads)
        try:
            assert calls.reads(own)
            calls.run(x, out, keys=own, rotation=rotation, visible=visible)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(out, by_operations.reshape(rows, -1)), (rows, start, branches)
        assert torch.equal(own.key, wanted.key)
        assert torch.equal(own.value, wanted.value)


def test_keys_that_an_attention_does_not_take() -> None:
    keys = [numbers(KV_HEADS, CAPACITY, HEAD_DIM, seed=seed) for seed in (1, 2)]
    calls, plain = attention(), DenseKeys(*keys, 0)
    assert calls.reads(plain)
    assert not calls.reads(plain._replace(key=keys[0].half()))
    assert not calls.reads(plain._replace(scale=torch.ones(2, KV_HEADS, HEAD_DIM)))
    assert not calls.reads(plain._replace(start=torch.zeros(1, dtype=torch.int64)))
    x, out = torch.zeros(2, QKV), torch.zeros(2, HEADS * HEAD_DIM)
    rotation, seen = (torch.ones(2, HEAD_DIM),) * 2, torch.ones(2, 3).bool()
    for there, turned, visible in (
        (plain._replace(start=CAPACITY - 1), rotation, None),
        (plain._replace(start=-1), rotation, None),
        (plain._replace(key=keys[0][1:], value=keys[1][1:]), rotation, None),
        (plain._replace(value=keys[1][:, 1:]), rotation, None),
        (plain._replace(key=keys[0].half()), rotation, None),
        (plain, (torch.ones(2, HEAD_DIM // 2),) * 2, None),
        (plain, (torch.ones(2, HEAD_DIM).double(),) * 2, None),
        # More keys than there are, too few rows, no booleans, and not one after the other.
        (plain, rotation, seen),
        (plain._replace(start=5), rotation, seen[1:]),
        (plain._replace(start=5), rotation, seen.long()),
        (plain._replace(start=5), rotation, torch.ones(2, 6).bool()[:, ::2]),
    ):
        with pytest.raises(ValueError, match=r"Sequence\.run"):
            calls.run(x, out, keys=there, rotation=turned, visible=visible)
    for heads, head_dim in ((HEADS + 1, HEAD_DIM), (HEADS, HEAD_DIM + 2)):
        other = Sequence()
        rows, into = other.given(QKV), other.given(HEADS * HEAD_DIM)
        with pytest.raises(ValueError, match=r"Sequence\.attention"):
            other.attention(rows, into, heads, KV_HEADS, head_dim)


def test_heads_of_rows_are_normed() -> None:
    """As those of queries and keys are, in place: the other columns stay."""
    calls, rows = Sequence(), 3
    x = calls.given(QKV)
    weight = numbers(HEAD_DIM, seed=5)
    calls.norm(x, weight, x, NormKind.RMS, 0.0, EPS, heads=4, first=2 * HEAD_DIM)
    own = numbers(rows, QKV, seed=6)
    wanted = own.clone()
    part = wanted[:, 2 * HEAD_DIM : 6 * HEAD_DIM].unflatten(1, (4, HEAD_DIM))
    part.copy_(layer.rms_norm(part, weight, EPS))
    calls.run(own)
    assert torch.equal(own, wanted)


def test_what_a_sequence_does_not_take() -> None:
    calls = mlp("float32", NormKind.RMS, 0.0)
    for wrong in (
        torch.zeros(2, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(65, HIDDEN),
        torch.zeros(0, HIDDEN),
        torch.zeros(2, HIDDEN + 1),
        torch.zeros(2, 2 * HIDDEN)[:, ::2],
    ):
        assert not calls.fits(wrong), wrong.shape
    gate_up, rows = calls.own(2 * WIDTH), calls.own(WIDTH)
    for _ in range(18):
        calls.gated(gate_up, rows, Operation.SILU)
    with pytest.raises(ValueError, match="at most 24 calls"):
        calls.gated(gate_up, rows, Operation.SILU)


def test_what_a_sequence_is_not_made_of() -> None:
    calls = Sequence()
    x, out = calls.given(HIDDEN), calls.given(WIDTH)
    dense = numbers(WIDTH, 2 * HIDDEN, seed=1)
    for wrong in (dense, dense[:, ::2]):
        with pytest.raises(ValueError, match=r"Sequence\.product"):
            calls.product(x, wrong, out)
    with pytest.raises(ValueError, match=r"Sequence\.product"):
        calls.product(x, dense[:, :HIDDEN], out, torch.zeros(WIDTH, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"Sequence\.norm"):
        calls.norm(x, torch.zeros(HIDDEN + 1), x, NormKind.RMS, 0.0, EPS)
    with pytest.raises(ValueError, match=r"Sequence\.norm"):
        calls.norm(x, torch.zeros(HIDDEN - 1), x, NormKind.RMS, 0.0, EPS)
    calls.product(x, dense[:, :HIDDEN], out)
    calls.run(numbers(1, HIDDEN, seed=2), torch.empty(1, WIDTH))
    with pytest.raises(ValueError, match="no more calls"):
        calls.product(x, dense[:, :HIDDEN], out)


def test_threads_that_call_at_once_do_not_meet() -> None:
    """Each has helpers of its own; more threads than processors, for longer than helpers stay
    awake.
    """
    x = numbers(5, HIDDEN, seed=9)
    wanted = expected("float32", NormKind.RMS, 0.0, x)[0]

    def run(index: int) -> bool:
        torch.set_num_threads(2 + index % 3)
        calls, same = mlp("float32", NormKind.RMS, 0.0), True
        for turn in range(60):
            given, plain = x.clone(), torch.ones(5, HIDDEN)
            calls.run(given, plain)
            same = same and torch.equal(given, wanted)
            if turn % 20 == index % 20:
                time.sleep(0.001)
        return same

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(run, range(12)))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_helpers_end_with_their_thread() -> None:
    script = f"""
import os, sys, threading, time, torch
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_host_sequence import HIDDEN, NormKind, mlp, numbers

def threads():
    return len(os.listdir("/proc/self/task"))

def run(count=4):
    torch.set_num_threads(count)
    mlp("float32", NormKind.RMS, 0.0).run(numbers(2, HIDDEN, seed=1), torch.ones(2, HIDDEN))

run()
before = threads()
for _ in range(3):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
# The system counts a thread for a moment after it has ended.
end = time.monotonic() + 60
while threads() > before and time.monotonic() < end:
    time.sleep(0.01)
assert threads() == before, (threads(), before)
# Fewer threads: the surplus ones end.
run(2)
assert threads() == before - 2, (threads(), before)
run()
assert threads() == before, (threads(), before)
# A child has no helpers, and starts its own.
if not (child := os.fork()):
    run()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
run()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_threads_share_nothing_without_order(tmp_path) -> None:
    """ThreadSanitizer reads every access of callers and helpers."""
    here = Path(__file__).parent
    source, program = here.parents[1] / "kernels/host/source", tmp_path / "pool"
    built = subprocess.run(
        [
            *("cc", "-std=c11", "-O1", "-g", "-pthread", "-fsanitize=thread", f"-I{source}"),
            *(str(here / "pool_check.c"), str(source / "pool.c"), str(source / "threads.c")),
            *("-o", str(program)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        assert "error:" not in built.stderr, built.stderr
        pytest.skip("needs a C compiler with ThreadSanitizer")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert ran.returncode == 0, ran.stdout + ran.stderr
