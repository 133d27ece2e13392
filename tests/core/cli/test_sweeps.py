"""`triforce plan --sweep`: plans for several contexts, GPUs or links."""

from __future__ import annotations

import json

import pytest
from command import run


def figures(capsys, *arguments: object) -> dict:
    code, out, err = run(capsys, "plan", *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "gpus",
        pytest.param("context", marks=pytest.mark.slow),
        pytest.param("link", marks=pytest.mark.slow),
    ],
)
def test_sweeps(capsys, tmp_path, kind: str) -> None:
    picture = tmp_path / "sweep.png"
    options = ("--gpu", "rtx4090", "--sweep", kind, "--plot", picture)
    rows = figures(capsys, "llama2-7b-128k", *options)["rows"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    seconds = {(r["gpus"], r["link"], r["context"]): r["seconds_per_token"] for r in rows}
    if kind == "context":
        assert seconds[2, "pcie4x16", 131072] < seconds[1, "pcie4x16", 131072]
        assert seconds[1, "pcie4x16", 4096] < seconds[1, "pcie4x16", 131072]
    if kind == "link":
        assert seconds[1, "pcie4x16", 131072] < seconds[1, "pcie4x8", 131072]
        # A link is the lesser of slot and card.
        assert not any(link.startswith("pcie5") for _, link, _ in seconds)
    code, out, _ = run(capsys, "plan", "llama2-7b-128k", "--gpu", "rtx4090", "--sweep", kind)
    assert code == 0
    assert "SIMULATED" in out


def test_a_sweep_ends_at_what_was_given(capsys) -> None:
    base = ("smollm2-135m", "--gpu", "rtx3060")
    rows = figures(capsys, *base, "--sweep", "context", "-c", "6K")["rows"]
    assert [(row["gpus"], row["context"]) for row in rows] == [
        *((1, 4096), (1, 6144)),
        *((2, 4096), (2, 6144)),
    ]
    rows = figures(capsys, *base, "--sweep", "gpus", "--gpus", 3, "-c", "4K")["rows"]
    assert [(row["gpus"], row["context"]) for row in rows] == [(n, 4096) for n in (1, 2, 3)]
