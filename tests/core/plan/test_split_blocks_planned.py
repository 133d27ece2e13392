"""When the planner splits weights in blocks, and what it takes their drafts to be worth."""

from __future__ import annotations

import json

import pytest

from triforce_core.cli.main import main
from triforce_core.model.known.shapes import read_model
from triforce_core.plan.simulation.case import Case
from triforce_core.settings import SPLIT
from triforce_offload.machine.profiles import named


def planned(capsys, model: str, context: int, *more: str) -> dict:
    arguments = ["plan", model, "--gpu", "rtx4090", "--context", str(context), "--json", *more]
    assert main(arguments) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("model", "context", "gpus", "saves"),
    [
        ("qwen3-32b:Q6_K", 32768, 1, 0.1),
        ("qwen3-32b:Q5_K_M", 32768, 1, 0.15),
        ("qwen3-32b:Q4_K_M", 131072, 1, 0.15),
        ("qwen2.5-72b:Q5_K_S", 16384, 2, 0.25),
    ],
)
def test_what_would_stream_is_split(
    capsys, model: str, context: int, gpus: int, saves: float
) -> None:
    cards = "--gpus", str(gpus)
    chosen = planned(capsys, model, context, *cards)
    stored = planned(capsys, model, context, *cards, "--weights", "stored")
    split = chosen["placement"]["split_layers"]
    # Every layer of which the plan says so has low bits that stream.
    assert split == len(chosen["plan"]["split_layers"]) > 0
    assert chosen["seconds_per_token"] < (1 - saves) * stored["seconds_per_token"]


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        # All weights fit.
        ("qwen3-8b:Q6_K", 1),
        # Each number has too few bits, or too many for 4 of them to draft.
        ("qwen3-32b:Q4_0", 1),
        ("qwen3-32b:Q8_0", 1),
        # A matrix without room would end the load of several ranks.
        ("qwen3-32b:FP8", 2),
    ],
)
def test_what_gains_nothing_stays_as_it_is_stored(capsys, model: str, gpus: int) -> None:
    chosen = planned(capsys, model, 32768, "--gpus", str(gpus))
    assert chosen["placement"]["split_layers"] == 0


def test_drafts_of_a_mix_lose_what_its_types_do() -> None:
    """Types that are not split lose nothing."""
    of = {}
    for mix in ("Q6_K", "Q5_K_M", "Q4_K_M", "FP8"):
        shape = read_model(f"qwen3-32b:{mix}")
        case = Case(shape.config, named("rtx4090"), 32768, pieces=shape.pieces, split=SPLIT)
        of[mix] = case.acceptance_of_high_bits
    assert (of["Q6_K"], of["FP8"]) == pytest.approx((0.93, 0.96))
    assert 0.93 < of["Q5_K_M"] < 0.97 < of["Q4_K_M"] < 1
