"""The processor's compiled kernels: every make of vector units that runs here, rows that do not
depend on their neighbours, damaged input, and machines without them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from float_bounds import assert_within, product_bound

from triforce_kernels import dispatch
from triforce_kernels.attention.scoring import ScoreBuffer
from triforce_kernels.attention.streaming import Running, attend_blocks, attend_cache, attend_tail
from triforce_kernels.dispatch import HOST, REFERENCE, KernelsError
from triforce_kernels.experts.grouped import in_tiles
from triforce_kernels.host import library as found
from triforce_kernels.host import structures
from triforce_kernels.host import weights as host
from triforce_kernels.weights import blocks, integers, split_bf16
from triforce_kernels.weights.block_types import ALL_TYPES, OF_INTEGERS, BlockType
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.high_bits import HighBitsWeight
from triforce_kernels.weights.linear import Weight, linear

LIBRARY = found.library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="needs the compiled kernels")
MAKES = found.makes(LIBRARY) if LIBRARY else []
KINDS = [ALL_TYPES[name] for name in structures.FORMATS if name in ALL_TYPES]
# Where the half-precision numbers of a block are, whose exponents random bits would make too large.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q6_K_HIGH": (144,)}
HALVES |= dict.fromkeys(("MXFP4", "NVFP4", "F8_E4M3", "F8_HIGH"), ())
HALVES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q5_K_HIGH"), (0, 2))


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_forced", HOST)


def random_blocks(kind: BlockType, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random rows of a block type, with scales of a usual size."""
    generator = torch.Generator().manual_seed(seed)
    shape = rows, columns // kind.elements, kind.nbytes
    data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if kind.name in ("BF16", "F16"):
        data[..., 1] &= 0xBB
    elif kind.name == "F8_E4M3":
        data[..., 128:] = torch.rand(*shape[:2], 1, generator=generator).view(torch.uint8)
        data[..., :128] &= 0xF7
    elif kind.name == "F8_HIGH" or kind in OF_INTEGERS:
        zeros = data[..., 0] % 17
        data[..., :4] = torch.rand(*shape[:2], 1, generator=generator).view(torch.uint8)
        if kind in OF_INTEGERS:
            data[..., 0] = zeros
    for place in HALVES.get(kind.name, (0,) if kind.elements > 1 else ()):
        data[..., place + 1] &= 0xBB
    if kind.name == "NVFP4":
        data[..., :4] = torch.rand(*shape[:2], 1, generator=generator).view(torch.uint8)
        data[..., 4:12] &= 0xF7
    if kind.name == "MXFP4":
        data[..., 0] = data[..., 0] % 9 + 122
    return data.flatten(1)


def weights(columns: int) -> dict[str, Weight]:
    """A matrix of an odd number of rows in every format that the kernels multiply by."""
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(37, columns, generator=generator)
    # Some numbers far below the others are exceptions.
    rare = torch.rand(dense.shape, generator=generator) < 0.01
    split = split_bf16.encode(dense.where(~rare, dense * 1e-9).bfloat16())
    made: dict[str, Weight] = {
        "F32": dense,
        "split bf16": split,
        "part of split bf16": split.rows(5, 36),
        "high bf16": HighBitsWeight.of(split),
    }
    for bits, groups in integers.GROUPS.items():
        for group in groups:
            if columns % group == 0:
                made[f"int{bits} of {group}"] = integers.quantise(dense, group, bits=bits)
    for kind in KINDS:
        if columns % kind.elements == 0:
            made[kind.name] = BlockWeight(random_blocks(kind, 37, columns), kind, columns)
    return made


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_reference_to_the_last_bit(make, kind: BlockType) -> None:
    data = random_blocks(kind, 33, 3 * 256)
    decoded = host.decode_blocks(data, kind, torch.float32)
    assert torch.equal(decoded, blocks.reference_decode(data, kind, torch.float32))


@pytest.mark.parametrize("columns", [2, 38, 96, 1024, 2816])
def test_products_are_those_of_the_numbers(make, columns: int) -> None:
    """Odd sizes, and rows longer than what is decoded at a time."""
    for weight in weights(columns).values():
        exact = torch.cat([rows for _, rows in _dense(weight)]).double()
        for rows in (1, 2, 3, 4, 5, 64):
            x = torch.randn(rows, columns + 3)[:, :columns]
            product = linear(x, weight)
            assert_within(product, x.double() @ exact.T, product_bound(x, exact, torch.float32))


@pytest.mark.parametrize("columns", [38, 256, 2816])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(make, columns: int) -> None:
    """And however many threads compute, and whichever part of a matrix it is multiplied by."""
    x = torch.randn(64, columns)
    for name, weight in weights(columns).items():
        alone = torch.cat([linear(row[None], weight) for row in x])
        for first, end in (*pairwise((0, 1, 3, 8, 25, 64)), (0, 64)):
            assert torch.equal(linear(x[first:end], weight), alone[first:end]), name
        with threads(3):
            assert torch.equal(linear(x, weight), alone), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_half_precision_multiply_numbers_that_are_not_rounded(
    make, dtype: torch.dtype
) -> None:
    """At most the result is rounded, with few rows and with many."""
    for name, weight in weights(512).items():
        if name.startswith("int"):
            continue  # Its scales are in the dtype of the rows.
        exact = torch.cat([rows for _, rows in _dense(weight)]).double()
        for rows in (1, 4, 64, 70):
            x = torch.randn(rows, 512).to(dtype)
            expected = x.double() @ exact.T
            bound = product_bound(x, exact, torch.float32)
            rounding = torch.finfo(dtype).eps / 2 * (expected.abs() + bound)
            product = linear(x, weight).double()
            finite = product.isfinite()
            assert finite.float().mean() > 0.9, name
            assert_within(product[finite], expected[finite], (bound + rounding)[finite])


@pytest.mark.parametrize("head_dim", [6, 64, 100, 256])
def test_attention_of_a_row_does_not_depend_on_others(make, head_dim: int) -> None:
    """Nor on the threads, nor on how many blocks come at once."""
    query = torch.randn(3, 24, head_dim)
    key, value = torch.randn(2, 5, 3, 80, head_dim)
    results = []
    for rows, at_once, count in ((24, 5, 1), (24, 1, 1), (1, 5, 1), (7, 2, 1), (24, 5, 3)):
        out = torch.empty(3, 24, 5 * 5)
        parts = []
        with threads(count):
            for first in range(0, 24, rows):
                some = query[:, first : first + rows].contiguous()
                running, here = Running.of(some), out[:, first : first + rows]
                scores = ScoreBuffer(here, 0, 16)
                for block in range(0, 5, at_once):
                    piece = slice(block, block + at_once)
                    attend_blocks(running, some, key[piece], value[piece], scores.at(5 * block))
                empty = key[0, :, :0]
                parts.append(attend_tail(running, some, empty, empty, some.shape[1]).out)
        results.append((torch.cat(parts, 1), out))
    for attended, scored in results[1:]:
        assert torch.equal(attended, results[0][0])
        assert torch.equal(scored, results[0][1])


@pytest.mark.parametrize("window", [None, 20])
def test_attention_over_a_cache_is_that_of_the_reference(
    make, monkeypatch, window: int | None
) -> None:
    query, cache = torch.randn(2, 4 * 5, 72), torch.randn(2, 2, 200, 72)
    results = []
    for name in (HOST, REFERENCE):
        monkeypatch.setattr(dispatch, "_forced", name)
        results.append(attend_cache(query, *cache, 5, 130, window))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_is_never_taken_for_no_keys(make, where: str) -> None:
    """A row whose every score is NaN gives NaN, as the reference does, not zeros."""
    query, cache = torch.randn(2, 3, 64), torch.randn(2, 2, 100, 64)
    if where == "query":
        query[1, 2] = float("nan")
    else:
        cache[0, 1] = float("nan")
    part = attend_cache(query, *cache, 1, 99)
    assert part.out[1, 2].isnan().all()
    assert part.lse[1, 2].isnan()
    assert part.out[0].isfinite().all()


def test_nan_in_one_score_reaches_the_scores_of_all_later_chunks(make) -> None:
    """With 16 heads the keys of a head are one split."""
    query, cache = torch.randn(16, 1, 64), torch.randn(2, 1, 16, 256, 64)
    cache[0, 0, :, 3, 0] = float("nan")
    scores = ScoreBuffer(torch.empty(16, 1, 32), 0, 8)
    attend_blocks(Running.of(query), query, *cache, scores)
    assert scores.out[..., 8:].isnan().all()


def test_what_the_kernels_do_not_take_goes_to_the_references_or_is_refused() -> None:
    double = torch.randn(2, 5, 16, dtype=torch.float64)
    cache = torch.randn(2, 2, 30, 16, dtype=torch.float64)
    assert attend_cache(double, *cache, 5, 20).out.dtype == torch.float64
    wide = torch.randn(1, 2, 1026), torch.randn(1, 4, 1026), torch.randn(1, 4, 1026)
    assert attend_cache(*wide, 1, 3).out.isfinite().all()
    assert linear(torch.randn(2, 0), torch.randn(3, 0)).tolist() == [[0.0] * 3] * 2
    data = random_blocks(ALL_TYPES["Q8_0"], 3, 64)
    nothing = linear(torch.randn(0, 64), BlockWeight(data, ALL_TYPES["Q8_0"], 64))
    assert nothing.shape == (0, 3)
    assert linear(torch.randn(1, 70, 64), torch.randn(5, 64)).shape == (1, 70, 5)
    with pytest.raises(ValueError, match="dense_matmul cannot take x"):
        linear(torch.randn(4, 64), torch.randn(128, 96))
    with pytest.raises(IndexError, match="an expert is chosen that is none of 4"):
        in_tiles(torch.tensor([[0, 4]]), 4)


def test_a_damaged_list_of_exceptions_is_never_followed(make) -> None:
    """Neither its places nor its starts, which may be anything, lead outside of the matrix."""
    generator = torch.Generator().manual_seed(5)
    whole = split_bf16.encode(torch.randn(64, 128, generator=generator).bfloat16() ** 9)
    assert len(whole.places) > 20
    clean = split_bf16.reference_decode(whole, None)
    for turn in range(30):
        for part in (whole.places, whole.starts):
            part.random_(-(2**31), 2**31 - 1, generator=generator)
            if turn % 2:
                part.copy_(part.sort().values)
        decoded = split_bf16.decode(whole)
        coded = whole.high != split_bf16.EXCEPTION
        same = decoded.view(torch.int16) == clean.view(torch.int16)
        assert (same | ~coded).float().mean() > 0.5, "a few numbers may be replaced, within rows"


def test_without_the_library_the_references_run(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "library", lambda: None)
    dispatch._backend.cache_clear()
    try:
        monkeypatch.setattr(dispatch, "_forced", "")
        assert dispatch.backend(torch.device("cpu")) == REFERENCE
        monkeypatch.setattr(dispatch, "_forced", HOST)
        with pytest.raises(KernelsError, match="TRIFORCE_KERNELS=host, which is not compiled here"):
            dispatch.backend(torch.device("cpu"))
    finally:
        dispatch._backend.cache_clear()


def test_a_library_of_another_version_is_not_used(monkeypatch) -> None:
    monkeypatch.setattr(found, "_VERSION", found._VERSION + 1)
    assert found.library.__wrapped__() is None


def test_vector_units_can_be_chosen_of_those_that_are_here(monkeypatch) -> None:
    monkeypatch.setenv(found.VARIABLE, MAKES[-1])
    assert found.library.__wrapped__() is not None
    assert found.vectors() == MAKES[-1]
    LIBRARY.triforce_use_make(0)
    monkeypatch.setenv(found.VARIABLE, "mmx")
    with pytest.raises(found.LibraryError, match=r"TRIFORCE_VECTORS is 'mmx'; here run .*plain"):
        found.library.__wrapped__()


def test_structures_are_those_of_the_header() -> None:
    """The library says how large it takes them to be."""
    for kind in structures.STRUCTURES:
        size = getattr(LIBRARY, f"triforce_size_of_{kind.__name__.lower()}")()
        assert size == ctypes.sizeof(kind), kind


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with `count` threads inside of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def _dense(weight: Weight) -> Iterator[tuple[int, torch.Tensor]]:
    """The weight's numbers as the reference decodes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_forced", REFERENCE)
        if isinstance(weight, torch.Tensor):
            yield 0, weight
        else:
            yield from weight.dense_rows(torch.float32)
