"""The check of routers: what it says that a pool has is what a run's pools had."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import PLACEMENTS, add_tokenizer, make_model

import checks.routing as script
import frame
from triforce_core import Engine, SamplingParams
from triforce_core.model import mlps

TOKENS = 12


@pytest.fixture
def model(tmp_path):
    make_model("mixtral", tmp_path, num_local_experts=16)
    add_tokenizer(tmp_path)
    (tmp_path / "prompt.txt").write_text("a text of some length, " * 8)
    return tmp_path


def test_a_pool_has_what_the_check_says(model, monkeypatch) -> None:
    records, choose = [], mlps.choose
    monkeypatch.setattr(frame, "print_record", records.append)
    arguments = ["--model", str(model), "--prompt", str(model / "prompt.txt"), "--context", "80"]
    arguments += ["--tokens", str(TOKENS)]
    assert script.main(arguments) == 0
    assert mlps.choose is choose
    record = records[0]
    assert record["prompt_tokens"] == 80 - TOKENS
    for slots, pool in record["pools"].items():
        layers = tuple(range(3))
        placement = replace(PLACEMENTS["weights"], expert_layers=layers, processor_layers=layers)
        placement = replace(placement, expert_slots=int(slots))
        with Engine.from_pretrained(
            model, device="cpu", method="autoregressive", max_context=80, placement=placement
        ) as engine:
            prompt = engine.token_ids((model / "prompt.txt").read_text())[: 80 - TOKENS]
            experts = engine.generate(prompt, SamplingParams(TOKENS, temperature=0)).stats[
                "experts"
            ]
        found = experts["found"] / (experts["found"] + experts["missing"])
        assert pool["has"] == pytest.approx(found)
    has = [pool["has"] for pool in record["pools"].values()]
    assert has == sorted(has)
    assert record["distinct_experts"]["1"]["measured"] == record["chosen"] == 2


def test_routers_that_repeat_and_those_that_do_not() -> None:
    same, others = [[[0, 1]] * 8], [[[0, 1], [2, 3], [4, 5], [6, 7]] * 2]
    nothing = [[[8, 9]]]
    assert script.distinct(same, 4) == 2
    assert script.distinct(others, 4) == 8
    assert script.hits(nothing, same, 16, 4) == pytest.approx(7 / 8)
    assert script.hits(nothing, others, 16, 4) == 0, "what comes again is gone by then"
    assert script.hits(nothing, others, 16, 8) == pytest.approx(0.5)


def test_a_model_without_experts_is_refused(model, capsys) -> None:
    make_model("llama", model)
    with pytest.raises(SystemExit, match="has no experts"):
        script.main(["--model", str(model), "--tokens", "4", "--context", "40"])
    with pytest.raises(SystemExit, match="--model names"):
        script.main([])
