from __future__ import annotations

import pytest

from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.memory.available import lendable_bytes
from triforce_offload.units import format_bytes, parse_bandwidth, parse_bytes, parse_flops


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("22GiB", 22 << 30),
        ("1.5 GiB", 3 << 29),
        ("500MB", 500_000_000),
        ("4096", 4096),
        ("7b", 7),
        ("2tib", 2 << 40),
        ("22g", 22 << 30),
        ("24GB", 24 * 10**9),
        (123, 123),
    ],
)
def test_sizes(text, size) -> None:
    assert parse_bytes(text) == size


def test_of_a_gpu_something_is_left_for_what_nobody_asks_for() -> None:
    """Kernels that are loaded later, and page tables of what will be registered."""
    assert lendable_bytes(24 << 30, 0) == (24 << 30) - (768 << 20)
    assert lendable_bytes(24 << 30, (63 << 30) + 1) == (24 << 30) - (768 << 20) - (128 << 20)
    assert lendable_bytes(100 << 20, 0) == 0


@pytest.mark.parametrize(
    "text", ["", "GiB", "22 GB/s", "-1GiB", "0", "1e3", "22gigs", "24", 0, -5, True]
)
def test_what_is_no_size(text) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


def test_bandwidths() -> None:
    assert parse_bandwidth("25GB/s") == 25e9
    assert parse_bandwidth("800MiB/s") == 800 * 1024**2
    assert parse_bandwidth(1e9) == 1e9


@pytest.mark.parametrize("text", ["25GB", "fast", "/s", 0, -1.0, float("inf"), True])
def test_what_is_no_bandwidth(text) -> None:
    with pytest.raises(UsageError):
        parse_bandwidth(text)


def test_rates_of_operations() -> None:
    for text in ("1.5TFLOP/s", "1.5 tflops", "1.5T", "1500 GFLOP/s", "1.5e12", 1.5e12):
        assert parse_flops(text) == 1.5e12
    for text in ("", "fast", "TFLOP/s", "1.5TB/s", "0", "-1e9", "1e999"):
        with pytest.raises(UsageError):
            parse_flops(text)


def test_format() -> None:
    assert format_bytes(512) == "512 B"
    assert format_bytes(3 << 29) == "1.50 GiB"
    assert format_bytes(5 << 40) == "5.00 TiB"


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1 << 20, "1 MiB"),
        (186_000_000, "177.4 MiB"),
        (30 << 30, "30 GiB"),
        (9 << 50, "9216 TiB"),
    ],
)
def test_sizes_of_a_refusal_have_few_digits(size: int, said: str) -> None:
    error = DoesNotFitError("it", size, 1 << 20, "nothing helps")
    assert str(error) == f"it needs {said} and 1 MiB is available; nothing helps"
