"""Measured rates are kept, and a cache that is damaged counts for nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import date

import pytest

from triforce_offload.errors import UsageError
from triforce_offload.machine import probe, timing
from triforce_offload.machine.probe import Rates, cached, emulated, measure_cpu

RATES = Rates(
    1e10, 1e11, 3e-6, None, ((1, 7e-11), (64, 4e-10)), 8e9, 5e10, 2e-9, None, "2026-11-21", 0.5
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "triforce-offload" / "hardware.json"


def never() -> Rates:
    raise AssertionError("measured again")


def test_what_was_measured_is_kept_for_its_key(cache) -> None:
    assert cached("a", lambda: RATES) == RATES
    assert cached("a", never) == RATES
    other = Rates(2e10, 1e11, 3e-6, 25e9, measured="2026-11-20")
    assert cached("b", lambda: other) == other
    assert cached("a", never) == RATES
    assert cached("b", never) == other
    assert [file.name for file in cache.parent.iterdir()] == ["hardware.json"]


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "\x00\xff",
        '{"a": null}',
        '{"a": {}}',
        json.dumps({"a": asdict(RATES) | {"flops_per_second": -1}}),
        json.dumps({"a": asdict(RATES) | {"memory_bytes_per_second": "fast"}}),
        json.dumps({"a": asdict(RATES) | {"product_seconds_per_byte": [[1]]}}),
        json.dumps({"a": asdict(RATES) | {"surprise": 1}}),
        # From before there was a day.
        json.dumps({"a": {k: v for k, v in asdict(RATES).items() if k != "measured"}}),
    ],
)
def test_a_damaged_cache_is_ignored_and_written_anew(cache, damage: str) -> None:
    cache.parent.mkdir()
    cache.write_text(damage, "latin-1")
    assert cached("a", lambda: RATES) == RATES
    assert cached("a", never) == RATES


def test_a_cache_that_cannot_be_written_is_said_once(cache, monkeypatch) -> None:
    cache.parent.write_text("a file where a folder should be")
    with pytest.warns(RuntimeWarning, match="not kept"):
        assert cached("a", lambda: RATES) == RATES


def test_rates_of_the_cpu_follow_from_seconds_and_bytes(monkeypatch) -> None:
    """On a clock that says how long each measurement takes: products with 1, 2, 8, 24 and 64 rows,
    attention of few and of many queries, small operations, decoding.
    """
    taken = iter([0.004, 0.004, 0.005, 0.01, 0.016, 0.02, 0.08, 0.006, 0.001])

    def seconds_of(run: Callable[[], object]) -> float:
        run()
        return next(taken)

    monkeypatch.setattr(probe, "seconds_of", seconds_of)
    monkeypatch.setattr(probe, "_MATRIX_BYTES", 8 << 20)
    rates = measure_cpu([(256, 128), (128, 256)])
    nbytes = 8 << 20
    assert rates.product_seconds_per_byte == tuple(
        (rows, seconds / nbytes)
        for rows, seconds in zip(probe._ROWS, (0.004, 0.004, 0.005, 0.01, 0.016), strict=True)
    )
    assert rates.memory_bytes_per_second == pytest.approx(nbytes / 0.004)
    # 64 rows multiply each number of 4 bytes 64 times, with a sum each.
    assert rates.flops_per_second == pytest.approx(2 * 64 * nbytes / 4 / 0.016)
    assert rates.launch_seconds == pytest.approx(0.006 / 600)
    assert rates.decode_seconds_per_number == pytest.approx(0.001 / (512 * 1024))
    hardware = emulated(rates, 1e8)
    assert hardware.emulated
    assert hardware.stream_bytes_per_second == 1e8
    assert hardware.source.startswith(f"measured on this machine on {date.today()}, at a load of")


def test_of_several_windows_the_best_counts(monkeypatch) -> None:
    """Somebody else has the machine for some of them."""
    seconds = iter([0.0, 0.08, 0.08, 0.06, 0.07, 0.051])
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def run() -> None:
        clock[0] += next(seconds)

    assert timing.seconds_of(run) == pytest.approx(0.051)


def test_what_is_forgotten_is_measured_again(cache) -> None:
    cached("a", lambda: RATES)
    probe.forget()
    with pytest.raises(AssertionError, match="measured again"):
        cached("a", never)


def test_without_a_gpu_a_link_or_a_card_must_be_named(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"--gpu, such as rtx1 or rtx2 .*--link-bandwidth"):
        probe.this_machine(None, ["rtx1", "rtx2"], [(8, 8)])
