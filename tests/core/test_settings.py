"""Settings as objects: one place for each default, and no field that nobody knows."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, random_ids
from oracle import greedy

from triforce_core import Engine, SamplingParams
from triforce_core.bench.settings import TESTS, BenchSettings
from triforce_core.cli.main import _parser, main
from triforce_core.cli.options import engine_config, given
from triforce_core.loading import open_model as opening
from triforce_core.machine_settings import MachineSettings
from triforce_core.plan.plan import Plan
from triforce_core.requests.stream import Completion
from triforce_core.settings import EngineConfig, MethodSettings, UnknownFieldError
from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.plan.placement import Placement


def test_fields_go_to_the_part_that_has_them() -> None:
    config = EngineConfig().changed(
        device="cpu", device_memory="1GiB", method="speculative", draft_tokens=5, dtype="float16"
    )
    assert config.machine == MachineSettings("cpu", 1 << 30)
    assert config.method == MethodSettings("speculative", draft_tokens=5)
    assert config.dtype == "float16"
    whole = config.changed(method=MethodSettings("autoregressive"), machine=MachineSettings())
    assert (whole.method.method, whole.machine.device) == ("autoregressive", None)
    assert config.changed(device=torch.device("cpu")).machine.device == "cpu"


@pytest.mark.parametrize(
    ("field", "nearest"),
    [
        ("gpu_memory", "device_memory"),
        ("drafttokens", "draft_tokens"),
        ("chunk", "chunk_size"),
        ("zzz", ""),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest(field: str, nearest: str) -> None:
    said = f"no setting '{field}'; the nearest are .*'{nearest}"
    for error in (UsageError, TypeError):
        with pytest.raises(error, match=said):
            EngineConfig().changed(**{field: 1})


def test_a_config_and_its_fields_make_the_same_engine(tiny) -> None:
    path, _ = tiny("llama")
    options = {"device": "cpu", "max_context": 100, "block_tokens": BLOCK, "budget": 32}
    config = EngineConfig().changed(**options, draft_tokens=9)
    with Engine.from_pretrained(path, config, draft_tokens=4) as engine:
        plan = engine.plan
        expected = engine.generate(random_ids(40), greedy(10)).token_ids
    with Engine.from_pretrained(path, **options, draft_tokens=4) as engine:
        assert engine.plan == plan
        assert engine.generate(random_ids(40), greedy(10)).token_ids == expected
    # What is said beside a plan changes it.
    with Engine.from_pretrained(
        path, device="cpu", max_context=100, plan=plan, draft_tokens=7
    ) as engine:
        assert engine.plan.method.draft_tokens == 7
        assert engine.plan.placement == plan.placement


def test_a_run_opens_its_model_once(speaking, monkeypatch) -> None:
    opened = []

    def counted(name: str):
        original = getattr(opening, name)

        def count(*args: object) -> object:
            opened.append(name)
            return original(*args)

        return count

    for name in ("open_checkpoint", "load_tokenizer"):
        monkeypatch.setattr(opening, name, counted(name))
    arguments = ["generate", str(speaking), "--prompt", "Hello", "--device", "cpu"]
    assert main([*arguments, "--max-new-tokens", "3"]) == 0
    assert sorted(opened) == ["load_tokenizer", "open_checkpoint"]


def test_the_command_line_has_the_defaults_of_the_classes() -> None:
    args = _parser()[0].parse_args(["generate", "model"])
    assert engine_config(args) == EngineConfig()
    assert SamplingParams(**given(args, SamplingParams)) == SamplingParams()
    args = _parser()[0].parse_args(["bench"])
    assert BenchSettings(**given(args, BenchSettings) | {"tests": TESTS}) == BenchSettings()
    for command, classes in (
        ("generate", (SamplingParams, MethodSettings)),
        ("bench", (BenchSettings,)),
    ):
        (subparsers,) = (a for a in _parser()[0]._actions if hasattr(a, "choices") and a.choices)
        actions = {action.dest: action for action in subparsers.choices[command]._actions}
        for settings in classes:
            for field in fields(settings):
                action = actions.get(field.name)
                shown = field.default not in (None, ()) and field.name != "tests"
                if action is not None and shown:
                    assert f"(default: {field.default})" in action.help, field.name


def test_flags_change_a_config() -> None:
    args = _parser()[0].parse_args(
        ["generate", "m", "--no-pin", "--no-graphs", "--budget", "64", "--draft-tokens", "auto"]
    )
    config = engine_config(args, EngineConfig().changed(draft_tokens=9, chunk_size=4))
    assert (config.machine.pin, config.machine.cuda_graphs) == (False, False)
    assert (config.method.budget, config.method.draft_tokens) == (64, "auto")
    assert config.method.chunk_size == 4


def test_an_explicit_budget_is_refused_below_some_memory_and_kept_above_it(tiny) -> None:
    """It is never dropped in silence, and more memory never refuses what less took."""
    path, _ = tiny("llama")
    kept = []
    for memory in range(1_200_000, 6_000_000, 200_000):
        try:
            with Engine.from_pretrained(
                path,
                device="cpu",
                device_memory=memory,
                max_context=500,
                block_tokens=BLOCK,
                budget=256,
            ) as engine:
                kept.append(engine.plan.budget)
        except DoesNotFitError as error:
            assert error.needed_bytes > error.available_bytes == memory
            kept.append(0)
    assert set(kept) == {0, 256}
    assert kept == sorted(kept)


def test_placements_that_no_engine_can_take_are_named(tiny) -> None:
    path, _ = tiny("llama")
    for wrong, said in (
        ((("0",), True, 0, 0, 3, 2), "streamed_layers"),
        (((), 1, 0, 0, 3, 2), "embedding_resident"),
        (((), True, -1, 0, 3, 2), "resident_kv_blocks"),
        (((), True, 0, 0, 3, 2, 1.5), "reclaimed_kv_blocks"),
    ):
        with pytest.raises(UsageError, match=said):
            Placement(*wrong)
    with Engine.from_pretrained(path, device="cpu", placement=PLACEMENTS["kv"]) as engine:
        assert engine.plan.placement.resident_kv_blocks == 0


@pytest.mark.parametrize("field", ["machine", "method", "placement"])
def test_a_part_of_another_kind_is_refused(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field} of an EngineConfig must be a .*, got 'cpu'"):
        EngineConfig(**{field: "cpu"})


def test_large_chunks_leave_a_budget_to_try() -> None:
    assert MethodSettings(chunk_size=4096).budgets == (8192,)


def test_an_explicit_budget_is_not_given_up_for_a_placement(tiny) -> None:
    path, _ = tiny("llama")
    placement = PLACEMENTS["weights"]
    options = {"device": "cpu", "max_context": 100, "placement": placement}
    with pytest.raises(UsageError, match="budget of 32 tokens needs all weights on the device"):
        Engine.from_pretrained(path, budget=32, **options)
    with Engine.from_pretrained(path, **options) as engine:
        assert engine.plan.budget == 0


def test_a_plan_says_what_runs_and_runs_again(tiny) -> None:
    """Where no retrieval cache fits, or its level was left out, the drafter proposes directly."""
    path, _ = tiny("llama")
    for placement in ("weights", "kv"):
        with Engine.from_pretrained(
            path, device="cpu", max_context=100, placement=PLACEMENTS[placement]
        ) as engine:
            plan = engine.plan
        assert plan.method.method == ("speculative" if placement == "weights" else "triforce")
        # The plan's own context, though the model has more positions.
        with Engine.from_pretrained(path, device="cpu", plan=plan) as engine:
            assert engine.plan == plan
            assert engine.runtime.plan.requirements.context_tokens == 100


def test_blocks_that_stream_have_slots_whatever_was_planned() -> None:
    everything = Placement((), True, 40, 0, 0, 0)
    fewer = everything.with_resident_blocks(3)
    assert fewer.resident_kv_blocks == 3
    assert min(fewer.kv_slots, fewer.staging_slots) > 0
    assert PLACEMENTS["both-one-slot"].with_resident_blocks(3).kv_slots == 1


def test_what_is_of_the_wrong_kind_is_a_usage_error(speaking) -> None:
    for wrong in (None, 3):
        with pytest.raises(UsageError, match="a model is a path or a hub id"):
            Engine.from_pretrained(wrong)
    with pytest.raises(UsageError, match="a plan is a Plan or a path, and this is int"):
        Engine.from_pretrained(speaking, plan=5)
    with Engine.from_pretrained(speaking) as engine:
        for params in ({"max_new_tokens": 3}, 5):
            with pytest.raises(UsageError, match="params must be SamplingParams, got"):
                engine.generate("hi", params)
        for ask in (engine.generate, engine.chat):
            with pytest.raises(UsageError, match="the text is not UTF-8 text"):
                ask("hi \udc80")


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        ("hi", None, "prompts must be a list of prompts, got str"),
        ({"a": "hi"}, None, "prompts must be a list of prompts, got dict"),
        (iter(["hi"]), None, "prompts must be a list of prompts, got list_iterator"),
        ([3], None, r"the request for prompts\[0\]: a prompt is text or .*, and this is int"),
        (["hi"], 5, "params must be SamplingParams or a list of them, got int"),
        (["hi"], "5", "params must be SamplingParams or a list of them, got str"),
        (["hi"], {"top_k": 5}, r"params must be .*, got dict; write SamplingParams\(\*\*params\)"),
        (
            ["hi", "ho"],
            [None] * 3,
            "params must be .* of 2 of them, one for .*; got a list of 3",
        ),
        (["hi", "ho"], [None, 5], r"params\[1\] must be SamplingParams, got int"),
        (
            ["hi", "ho"],
            [None, {"top_k": 5}],
            r"params\[1\] must be .*, got dict; write SamplingParams\(\*\*params\[1\]\)",
        ),
        (
            ["hi", "ho"],
            [None, SamplingParams(logit_bias={10**6: 1.0})],
            r"the request for prompts\[1\]: a token of logit_bias must be 0 to \d+, got 1000000",
        ),
    ],
)
def test_what_is_wrong_among_several_requests_is_named(speaking, prompts, params, said) -> None:
    with Engine.from_pretrained(speaking, device="cpu", max_context=300) as engine:
        with pytest.raises(UsageError, match=f"^{said}$"):
            engine.generate_all(prompts, params)
        assert len(engine.generate_all(["hi"], [SamplingParams(2)])) == 1


def test_a_request_that_is_added_takes_sampling_params_alone(speaking) -> None:
    with Engine.from_pretrained(speaking, device="cpu", max_context=64) as engine:
        for params, said in (({"top_k": 3}, "got dict; write"), ([None], "got list")):
            with pytest.raises(UsageError, match=f"^params must be SamplingParams, {said}"):
                engine.add_request("hi", params, print)
        assert not engine.step()


def test_a_plan_of_a_version_that_chose_how_chunks_are_scored(tmp_path) -> None:
    file = tmp_path / "plan.json"
    plan = Plan(200, BLOCK, MethodSettings(method="triforce"), PLACEMENTS["kv"])
    raw = plan.as_dict()
    file.write_text(json.dumps(raw | {"retrieval": "mass"}))
    assert Plan.read(file) == plan
    file.write_text(json.dumps(raw | {"retrieval": "mean"}))
    with pytest.raises(UsageError, match=r"plan\.json: .* by attention mass alone"):
        Plan.read(file)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_tokens", "'max_new_tokens'"), ("temprature", "'temperature'"), ("topp", "'top_p'")],
)
def test_a_request_names_the_nearest_field(name: str, nearest: str) -> None:
    said = f"sampling has no setting '{name}'; the nearest are .*{nearest}"
    with pytest.raises(UnknownFieldError, match=said):
        SamplingParams(**{name: 5})
    assert replace(SamplingParams(), top_k=3) == pickle.loads(pickle.dumps(SamplingParams(top_k=3)))


def test_fields_of_a_request_are_not_those_of_a_method(speaking) -> None:
    with Engine.from_pretrained(speaking, device="cpu", max_context=64) as engine:
        methods = (engine.generate, engine.chat, engine.stream)
        for method in (*methods, engine.generate_all, engine.add_request):
            said = r"given as SamplingParams; write SamplingParams\(max_new_tokens=...\)"
            with pytest.raises(UnknownFieldError, match=said):
                method("Hello", max_new_tokens=5)
            with pytest.raises(UnknownFieldError, match="the nearest are 'max_new_tokens'"):
                method("Hello", max_tokens=5)
        made = engine.generate("Hello", SamplingParams(max_new_tokens=3, temperature=0))
    said = f"Completion({made.text!r}, 3 tokens, finish_reason='length')"
    assert repr(made) == said
    assert len(repr(Completion([1], "x" * 9999, "stop", {"a": "b" * 999}))) < 120
