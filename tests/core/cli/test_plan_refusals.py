"""What `triforce plan` refuses because it could not run, and what it says of published files."""

from __future__ import annotations

import json
import math
import re

import pytest
from command import run

from triforce_core.model.known.hub_ids import of_ollamas
from triforce_core.model.known.shapes import read_model

LLAMA = ("llama3.1-8b", "--gpu", "rtx4090", "--context", 8192)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*LLAMA, "--draft", "llama-68m"), "a draft model needs the same tokens"),
        ((*LLAMA, "--device-memory", "80GiB"), "is more than the 22.49 GiB of --gpu rtx4090"),
        ((*LLAMA, "--sweep", "gpus", "--compare", "autoregressive"), "--compare is for one plan"),
        (
            ("qwen3-8b", "--gpu", "rtx409"),
            "nearest: rtx4090, rtx5090, rtx4080 (`triforce plan --help` names all)\n",
        ),
        ((*LLAMA, "--acceptance", "most"), "--acceptance: 'most' is not a number"),
        ((*LLAMA, "--host-bandwidth", "60GB/s", "--host-flops", "fast"), "like 1.5TFLOP/s"),
        ((*LLAMA, "--host-bandwidth", "60GB/s", "--host-flops", "0"), "must be positive"),
        (("qwen3-8b:Q4KM", "--gpu", "rtx4090"), "'Q4KM' is none of Q2_K"),
    ],
)
def test_a_plan_that_could_not_run_is_refused(capsys, arguments, said: str) -> None:
    code, out, err = run(capsys, "plan", *arguments)
    assert (code, out, said in err) == (2, "", True)


def test_models_of_a_family_may_pad_their_vocabularies_differently(capsys) -> None:
    arguments = ("qwen2.5-72b", "--gpu", "rtx4090", "--context", 4096, "--draft", "qwen3-4b")
    assert run(capsys, "plan", *arguments)[0] == 0


def test_shares_and_rates_may_have_units(capsys) -> None:
    def planned(*options: str) -> str:
        command = ("plan", *LLAMA, "--method", "triforce", "--host-bandwidth", "60GB/s", *options)
        code, out, err = run(capsys, *command, "--json")
        assert code == 0, err
        return out

    plain = planned("--acceptance", "0.95", "--host-flops", "1.5e12")
    assert planned("--acceptance", "95%", "--host-flops", "1.5TFLOP/s") == plain


def test_a_size_of_memory_that_a_plan_shows_is_taken(capsys) -> None:
    """The card has a little less than the 22.49 GiB that tables show."""
    assert run(capsys, "plan", *LLAMA, "--device-memory", "22.49GiB")[0] == 0
    code, _, err = run(capsys, "plan", *LLAMA, "--device-memory", "22.6GiB")
    assert code == 2
    assert "more than the 22.49 GiB" in err


def test_dense_models_are_not_in_a_format_of_experts(capsys) -> None:
    code, _, err = run(capsys, "plan", "qwen3-8b:MXFP4", "--gpu", "rtx4090")
    assert code == 2
    assert "only experts are in MXFP4, and this model has none" in err


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("qwen3:8b", "qwen3-8b:Q4_K_M"),
        ("llama3.1:8b-instruct-q4_K_M", "llama3.1-8b:q4_K_M"),
        ("qwen3:30b-a3b", "qwen3-30b-a3b:Q4_K_M"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("gemma3:270m", "gemma3-270m:Q4_K_M"),
        ("qwen3-8b:Q4_K_M", "qwen3-8b:Q4_K_M"),
        ("nothing:8b", "nothing:8b"),
        ("qwen3-8b", "qwen3-8b"),
    ],
)
def test_shapes_are_known_by_ollamas_names(name: str, ours: str) -> None:
    assert of_ollamas(name) == ours
    if not name.startswith("nothing"):
        assert read_model(name).config == read_model(ours).config


@pytest.mark.parametrize(
    ("planned", "ran"),
    [
        ("qwen3:8b", "qwen3-8b:Q4_K_M"),
        # Its makers publish no GGUF files under this id.
        ("Qwen/Qwen3-8B:Q4_K_M", "qwen3-8b:Q4_K_M"),
        ("QWEN3-8B:Q4_K_M", "qwen3-8b:Q4_K_M"),
        ("unsloth/Qwen3-8B-GGUF:Q4_K_M", "unsloth/Qwen3-8B-GGUF:Q4_K_M"),
        ("hf.co/unsloth/Qwen3-8B-GGUF:Q4_K_M", "hf.co/unsloth/Qwen3-8B-GGUF:Q4_K_M"),
    ],
)
def test_a_plan_is_run_by_a_name_that_a_run_knows(capsys, planned: str, ran: str) -> None:
    _, out, _ = run(capsys, "plan", planned, *LLAMA[1:])
    assert f"Run it: triforce generate {ran} " in out


def test_the_smallest_gemma_has_its_published_size(capsys) -> None:
    config = read_model("gemma3-270m").config
    numbers = config.vocab * config.hidden + sum(
        math.prod(shape) for spec in config.layers for shape in spec.shapes(config.hidden).values()
    )
    # 268.1 million with the last norm, as the hub says of its file.
    assert numbers + config.hidden == 268_098_176


def test_positions_are_those_of_the_published_files(capsys) -> None:
    plan = ("plan", "qwen3-8b", "--gpu", "rtx4090")
    assert "40960 tokens of context" in run(capsys, *plan)[1]
    assert "declare" not in run(capsys, *plan)[1]
    said = "The published files declare 40,960 positions"
    assert said in run(capsys, *plan, "--context", 131072)[1]
    assert said in run(capsys, *plan, "--sweep", "context")[1]


def test_a_processor_without_a_rate_of_products_computes_nothing_and_says_so(capsys) -> None:
    code, _, err = run(capsys, "plan", *LLAMA, "--host-bandwidth", "60GB/s")
    assert (code, "the CPU computes nothing in this plan" in err) == (0, True)
    assert run(capsys, "plan", *LLAMA)[2] == ""


def test_a_run_without_a_retrieval_level_measures_no_acceptance_of_one(capsys, tmp_path) -> None:
    stats = {"acceptance": {"target": None, "retrieval": None}, "retrieval": None}
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    _, out, err = run(capsys, "plan", *LLAMA, "--stats", tmp_path / "stats.json")
    assert ", assumed" in " ".join(out.split())
    assert "stats.json holds no acceptance of drafts: it is assumed" in err


def test_several_sequences_share_passes(capsys) -> None:
    """One of four is slower than it would be alone, and all of them are faster."""
    plan = ("plan", "llama3.1-8b", "--gpu", "rtx4090", "--context", 4096)
    plans = [json.loads(run(capsys, *plan, "--json", "-np", count)[1]) for count in (1, 4)]
    alone, four = (each["seconds_per_token"] for each in plans)
    assert [each["sequences"] for each in plans] == [1, 4]
    assert alone < four < 4 * alone
    out = " ".join(run(capsys, *plan, "--sequences", 4)[1].split())
    assert f"{1 / four:.1f} tokens/s" in out
    assert f"all sequences │ {4 / four:.1f} tokens/s" in out
    assert "triforce serve meta-llama/Llama-3.1-8B-Instruct --context 4096" in out
    assert "--sequences 4" in out
    for wrong in (("--sequences", 0), ("--sequences", 2, "--save", "x.json")):
        code, _, err = run(capsys, *plan, *wrong)
        assert (code, "sequence" in err) == (2, True)


def test_dense_weights_are_suggested_where_they_are_faster(capsys) -> None:
    """An H100 reads 16 bits a number in less time than it computes with blocks of 4."""
    quantised = ("plan", "qwen3-8b:Q4_K_M", "--context", "8192", "--gpu")
    assert "Faster: add --weights dense" in run(capsys, *quantised, "h100")[1]
    assert "--weights dense" not in run(capsys, *quantised, "rtx4090")[1]

    def seconds(*options: str) -> float:
        out = run(capsys, *quantised, "h100", "--json", *options)[1]
        return json.loads(out)["seconds_per_token"]

    assert seconds("--weights", "dense") < 0.9 * seconds()


def test_a_slot_that_is_faster_than_the_card_is_named(capsys) -> None:
    slots = {"pcie5x16": "pcie4x16", "pcie5x8": "pcie4x8", "pcie4x8": None}
    for slot, reached in slots.items():
        _, _, err = run(capsys, "plan", *LLAMA, "--gpu", "rtx4090", "--link", slot)
        assert (f"a slot of {slot} gives it {reached}" in err) == (reached is not None)


def test_a_head_is_suggested_where_nothing_drafts_well(capsys) -> None:
    """Layers of a quantised 70B stream, and nothing but n-grams drafts for it."""
    plan = ("plan", "llama3.1-70b:Q4_K_M", "--gpu", "rtx4090", "--context", "8192")
    out = " ".join(run(capsys, *plan)[1].split())
    suggested = re.search(r"with an EAGLE-3 head, .*?\(([.\d]+) s/token\)", out)
    with_head = run(capsys, *plan, "--draft", "eagle3", "--json")[1]
    assert float(suggested[1]) == pytest.approx(
        json.loads(with_head)["seconds_per_token"], abs=1e-4
    )
    gemma = run(capsys, "plan", "gemma4-31b:Q4_K_M", *plan[2:])[1]
    assert "with an assistant" in " ".join(gemma.split())
    for nothing in (("--draft", "ngram"), ("--draft", "none"), ("--draft", "eagle3")):
        assert "Faster: with" not in run(capsys, *plan, *nothing)[1]
    assert "Faster: with" not in run(capsys, "plan", "qwen3.8-27b:Q4_K_M", *plan[2:])[1]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("qwen3-8b:Q4_K_M",), "no retrieval level, since nothing streams"),
        (("llama3.1-70b:Q4_K_M",), "no retrieval level, since weights stream and copies of them"),
        (("llama3.1-8b", "--method", "speculative"), None),
        (("llama3.1-8b", "--method", "autoregressive"), None),
        (("llama2-7b-128k", "--context", "131072"), None),
        (("qwen3.5-35b-a3b", "--context", "32768"), "its MTP head does not draft, since"),
        (("qwen3.5-35b-a3b", "--method", "autoregressive"), None),
        (("qwen3.8-27b:Q4_K_M", "--draft", "ngram"), "no retrieval level, since nothing streams"),
    ],
)
def test_a_plan_says_why_a_level_is_not_there(capsys, arguments, why: str | None) -> None:
    out = run(capsys, "plan", "--context", "8192", *arguments, "--gpu", "rtx4090")[1]
    plan = " ".join(out[out.index("Plan:") : out.index("Run it:")].split())
    assert plan.count("since") == (why is not None)
    assert why is None or why in plan
