"""The memory of a plan: rows say what a reader needs without adding."""

from __future__ import annotations

import pytest
from command import run

from triforce_core.cli.plan.report import _kv_on_device, _weights_on_device


@pytest.mark.parametrize(
    ("resident", "embedding", "said"),
    [
        (36, True, "weights of all 36 layers, embedding and output"),
        (12, False, "weights of 12 of 36 layers and output"),
        (0, True, "weights of embedding and output"),
        (0, False, "weights of the output"),
    ],
)
def test_weights_on_the_device_are_named(resident: int, embedding: bool, said: str) -> None:
    placement = {"layers": 36, "resident_weight_layers": resident, "embedding_resident": embedding}
    assert _weights_on_device(placement) == said


@pytest.mark.parametrize(
    ("blocks", "kept", "reclaimed", "said"),
    [
        (0, 0, 0, "KV of all tokens"),
        (288, 288, 0, "KV: all 288 blocks and the newest tokens"),
        (288, 30, 0, "KV: 30 of 288 blocks and the newest tokens"),
        (
            *(1024, 804, 163),
            "KV: 804 of 1024 blocks (163 of them in memory that only the prefill needs) and the "
            "newest tokens",
        ),
    ],
)
def test_blocks_on_the_device_are_counted_once(
    blocks: int, kept: int, reclaimed: int, said: str
) -> None:
    placement = {"kv_blocks": blocks, "resident_kv_blocks": kept, "reclaimed_kv_blocks": reclaimed}
    assert _kv_on_device(placement) == said


def test_what_is_in_one_piece_has_no_count(capsys) -> None:
    _, out, _ = run(capsys, "plan", "smollm2-135m", "--gpu", "h100", "--context", "2048")
    assert "weights of all 30 layers, embedding and output" in out
    assert " 0 of " not in out
    assert "KV of all tokens" in out or "KV: all " in out
