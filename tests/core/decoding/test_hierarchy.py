"""L4 for the hierarchy, and what holds for every draft: reproducible texts, exact ends, placements
that are bitwise equal, and sound figures.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, FAMILIES, PLACEMENTS, make_model, placed, random_ids
from oracle import LogitsRecorder, assert_equal_but_for_ties, greedy
from tiny_families import CHOOSE_KEYS

from triforce_core import Engine, SamplingParams
from triforce_offload.errors import CheckpointError, DoesNotFitError, LinkError, UsageError

PROMPT, NEW = 75, 32
METHODS = ("triforce", "speculative")
# Drafters, budgets, lengths, policies and rules; every one of them gives the same greedy text.
RUNS = (
    {"draft": "ngram", "budget": 16, "draft_tokens": 5},
    {"draft": "none", "budget": 32, "draft_tokens": 1},
    {"draft": "{self}", "budget": 64, "draft_tokens": 64, "inner_draft_tokens": 7},
    {"draft": "{other}", "budget": 16, "draft_tokens": 9, "inner_draft_tokens": 3},
    {"draft": "{other}", "budget": 40, "chunk_size": 4},
    {"draft": "none", "budget": 400, "draft_tokens": 17, "accept": "coupled"},
    {"draft": "{self}", "method": "speculative", "draft_tokens": 12},
    {"draft": "ngram", "method": "speculative"},
    {"draft": "ngram", "method": "speculative", "tree": 12},
    {"draft": "{self}", "method": "speculative", "tree": 30, "draft_tokens": 6},
    {"draft": "{other}", "method": "speculative", "tree": 17, "accept": "coupled"},
)
# All of them run on these: plain, with one KV head for all, with angles that follow the length, and
# with windows. Any other family meets three of them, trees among the families' turns.
ALL_RUNS = ("llama", "llama-mqa", "dynamic-rope", "qwen3-windows")


def engine(path: Path, placement: str = "kv", **options: object) -> Engine:
    return Engine.from_pretrained(
        path,
        **{
            "device": "cpu",
            "max_context": 200,
            "block_tokens": BLOCK,
            "placement": PLACEMENTS.get(placement),
            **options,
        },
    )


# Families with Mamba-2 layers.
MAMBA = ("granite4-h", "nemotron_h")


def filled(options: dict, own: Path, other: Path) -> dict:
    places = {"{self}": own, "{other}": other}
    return {**options, "draft": places.get(options["draft"], options["draft"])}


@pytest.mark.one_in(20)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_whatever_drafts(tiny, family: str) -> None:
    path, model = tiny(family)
    other, _ = tiny("qwen3" if family != "qwen3" else "llama")
    # The second half repeats the first, so that n-grams find something.
    prompts = [random_ids(PROMPT, 5), random_ids(38, 6) * 2]
    theirs = [
        copy.deepcopy(model)
        .generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :]
        .tolist()
        for prompt in prompts
    ]
    first = list(FAMILIES).index(family)
    chosen = (
        range(len(RUNS)) if family in ALL_RUNS else [(first + i * 4) % len(RUNS) for i in range(3)]
    )
    for i in chosen:
        placement = ("kv", "resident", "kv-in-part", "kv-one-slot")[i % 4]
        # A model whose layers have different heads, or a state, does not draft.
        drafts = not family.startswith(
            ("gemma4", "qwen3_5", "qwen3_next", "lfm2", "lfm3", *MAMBA, *CHOOSE_KEYS)
        )
        own = path if drafts else other
        options = filled(RUNS[i], own, other)
        if family in CHOOSE_KEYS:
            options.pop("budget", None)
        with engine(path, placement, **options) as ours:
            for prompt, expected in zip(prompts, theirs, strict=True):
                result = ours.generate(prompt, greedy(NEW))
                assert_equal_but_for_ties(model, prompt, result.token_ids, expected)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("prompt_tokens", [1, 2, 7, 8, 9, BLOCK, BLOCK + 1, 100])
@pytest.mark.parametrize("draft_tokens", [1, 2, 16, 64])
def test_any_prompt_and_draft_length_equals_transformers(tiny, prompt_tokens, draft_tokens) -> None:
    path, model = tiny("llama")
    prompt, new = random_ids(prompt_tokens, 9), max(40, draft_tokens + 16)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    with engine(path, draft="none", budget=16, draft_tokens=draft_tokens) as ours:
        result = ours.generate(prompt, greedy(new))
    assert_equal_but_for_ties(model, prompt, result.token_ids, theirs[0, prompt_tokens:].tolist())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placement", ["weights", "both", "both-one-slot"])
@pytest.mark.parametrize("draft", ["ngram", "{self}", "none"])
def test_with_weights_streamed_the_drafter_proposes_to_the_target(tiny, placement, draft) -> None:
    path, model = tiny("llama")
    prompt = random_ids(38, 6) * 2
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    with engine(path, placement, **filled({"draft": draft}, path, path)) as ours:
        result = ours.generate(prompt, greedy(NEW))
    assert_equal_but_for_ties(model, prompt, result.token_ids, theirs[0, len(prompt) :].tolist())
    drafter = {"ngram": ["ngram"], "{self}": ["model"], "none": []}[draft]
    assert result.stats["levels"] == [*drafter, "target"]
    assert result.stats["retrieval"] is None
    if draft == "{self}":
        assert result.stats["acceptance"]["target"] == 1


def test_a_drafter_that_is_the_target_is_always_accepted(tiny) -> None:
    """Within its window; and at both levels, since the retrieval cache holds the whole prompt."""
    path, _ = tiny("llama")
    for temperature in (0, 0.8):
        for accept in ("optimal", "coupled"):
            with engine(
                path, draft=path, budget=160, draft_tokens=8, inner_draft_tokens=3, accept=accept
            ) as ours:
                stats = ours.generate(
                    random_ids(60), SamplingParams(NEW, temperature=temperature, seed=1)
                ).stats
            assert stats["acceptance"]["target"] == stats["acceptance"]["retrieval"] == 1
            passes = -(-(NEW - 1) // 9)
            assert stats["passes"] == passes
            assert stats["draft_tokens"]["mean"] == (NEW - 1 - passes) / passes


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop_at", [1, 2, 5, 11, 30])
def test_end_of_text_inside_a_draft_ends_the_output(tmp_path, tiny, method, stop_at) -> None:
    path, model = tiny("llama")
    prompt = random_ids(PROMPT, 5)
    free = model.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False)[0, PROMPT:]
    free = free.tolist()
    stop = free[stop_at]
    expected = free[: free.index(stop) + 1]
    with engine(path, method=method, draft=path, draft_tokens=8, budget=128) as ours:
        result = ours.generate(prompt, greedy(60, stop_token_ids=(stop,)))
        assert result.token_ids == expected
        assert result.finish_reason == "stop"
        for limit in (1, 2, 3, 9, 10, 11):
            result = ours.generate(prompt, greedy(limit))
            assert result.token_ids == free[:limit]
            assert result.finish_reason == "length"


@pytest.mark.first
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_coupled_text_depends_on_the_seed_alone(tiny, temperature: float) -> None:
    path, _ = tiny("llama")
    other, _ = tiny("qwen3")
    params = SamplingParams(NEW, temperature=temperature, top_p=0.95, seed=3)
    prompt = random_ids(38, 6) * 2
    with engine(path, method="autoregressive", accept="coupled") as ours:
        expected = ours.generate(prompt, params).token_ids
        assert ours.generate(prompt, replace(params, seed=4)).token_ids != expected
    for i, options in enumerate(RUNS):
        placement = ("kv", "resident", "both", "kv-one-slot")[i % 4]
        options = filled({**options, "accept": "coupled"}, path, other)
        with engine(path, **placed(placement, options)) as ours:
            assert ours.generate(prompt, params).token_ids == expected


def test_a_seed_repeats_with_fixed_lengths(tiny) -> None:
    path, _ = tiny("llama")
    other, _ = tiny("qwen3")
    params = SamplingParams(NEW, temperature=1.0, seed=3)
    texts = []
    for _ in range(2):
        with engine(path, draft=other, draft_tokens=6, inner_draft_tokens=2, budget=16) as ours:
            texts += [ours.generate(random_ids(60), params).token_ids for _ in range(2)]
    assert all(text == texts[0] for text in texts)


@pytest.mark.first
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_placements_are_bitwise_equal(tiny, family: str, monkeypatch) -> None:
    """L5: at every level, wherever the KV cache lives."""
    path, _ = tiny(family)
    recorder = LogitsRecorder(monkeypatch)
    logits = {}
    for name in ("resident", "kv", "kv-one-slot", "kv-in-part"):
        with engine(path, name, draft="none", draft_tokens=6, budget=32) as ours:
            ours.generate(random_ids(PROMPT), greedy())
            logits[name] = recorder.take()
    for name, rows in logits.items():
        assert rows.isfinite().all(), name
        assert torch.equal(rows, logits["resident"]), name


def test_stats_add_up(tiny) -> None:
    path, _ = tiny("llama")
    other, _ = tiny("qwen3")
    with engine(path, draft=other, draft_tokens=6, inner_draft_tokens=2, budget=32) as ours:
        stats = ours.generate(random_ids(PROMPT), SamplingParams(61, temperature=1.0)).stats
        moved = stats["link"]["bytes_to_device"]
    assert json.loads(json.dumps(stats)) == stats
    lengths = stats["acceptance"]["accepted_lengths"]
    assert sum(lengths) <= stats["passes"]
    # Every pass gives what it accepted and one token more.
    assert sum(i * n for i, n in enumerate(lengths)) + stats["passes"] == 60
    assert 0 < stats["acceptance"]["target"] < 1
    assert 0 < stats["acceptance"]["retrieval"] < 1
    assert stats["tokens_per_pass"] == 60 / stats["passes"]
    assert 0 < stats["draft_tokens"]["mean"] <= 6
    assert stats["levels"] == ["model", "retrieval", "target"]
    cache = stats["retrieval"]
    assert (cache["budget_tokens"], cache["chunk_size"]) == (32, 8)
    assert 0 < cache["churn"] < 1
    seconds = stats["seconds"]
    assert 0 < seconds["draft"] + seconds["verify"] <= seconds["decode"]
    # What passes carried, and the chunks that changed besides.
    link = stats["link"]
    assert moved > link["floor_seconds_per_pass"] * stats["passes"] * link[
        "bandwidth_gb_per_s"
    ] * 1e9 * (1 + 1e-9)


@pytest.mark.slow
def test_generation_runs_past_any_budget(tiny) -> None:
    path, model = tiny("llama")
    prompt = random_ids(30, 2)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False)
    with engine(path, draft="none", draft_tokens=7, budget=16, max_context=400) as ours:
        result = ours.generate(prompt, greedy(200))
    assert_equal_but_for_ties(model, prompt, result.token_ids, theirs[0, 30:].tolist())
    assert result.stats["retrieval"]["budget_tokens"] == 16


def test_pieces_say_where_their_tokens_come_from(speaking) -> None:
    # Fixed lengths: the text must not follow timings, as a special token in it has no piece.
    options = {"draft": speaking, "draft_tokens": 4, "inner_draft_tokens": 2, "budget": 32}
    with engine(speaking, **options) as ours:
        stream = ours.stream("Hello there, you", SamplingParams(60, temperature=0.9, seed=2))
        pieces = list(stream.pieces())
        result = stream.result
    assert "".join(piece.text for piece in pieces) == result.text
    assert {piece.origin for piece in pieces} == {"plain", "accepted", "corrected", "bonus"}
    lengths = result.stats["acceptance"]["accepted_lengths"]
    origins = [piece.origin for piece in pieces]
    # A pass gives one token of the target's own, and before it what held of the draft.
    assert origins.count("corrected") + origins.count("bonus") == sum(lengths)
    assert origins.count("accepted") == sum(lengths[1:])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"draft_tokens": 0}, "draft_tokens must be auto or 1 to 256, got 0"),
        ({"draft_tokens": 257}, "257"),
        ({"inner_draft_tokens": "many"}, "'many'"),
        ({"chunk_size": 0}, "chunk_size must be a power of two, got 0"),
        ({"chunk_size": 6}, "6"),
        ({"chunk_size": 32}, "chunk_size 32 is more than the 16 tokens of a block"),
        ({"budget": 0}, "budget must be a multiple of the chunk size 8, and at least 16, got 0"),
        ({"budget": 100}, "100"),
        ({"accept": "always"}, "always"),
        ({"draft": ""}, "draft must be"),
        ({"draft": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_settings_that_cannot_be_used_are_named(tiny, options, named) -> None:
    path, _ = tiny("llama")
    with pytest.raises(UsageError, match=named):
        engine(path, **options)


def test_a_drafter_with_another_vocabulary_is_refused_by_name(tiny, speaking, tmp_path) -> None:
    path, _ = tiny("llama")
    make_model("llama", tmp_path, vocab_size=96)
    with pytest.raises(UsageError, match=r"a vocabulary of 96 tokens, the model one of 97"):
        engine(path, draft=tmp_path)
    # With tokenizers at hand these decide, whatever the sizes of the matrices.
    for file in speaking.glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with engine(speaking, draft=tmp_path) as ours:
        ours.generate("Hello", greedy(20))
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match=r"another vocabulary: 97 .* of which 95 are the same"):
        engine(speaking, draft=tmp_path)


def test_padded_vocabularies_draft_for_each_other(speaking, tmp_path) -> None:
    """Models of one family pad their matrices to different sizes; padding is never drawn."""
    make_model("llama", tmp_path, vocab_size=120)
    for file in speaking.glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for target, drafter in ((speaking, tmp_path), (tmp_path, speaking)):
        # Of the last prompt the smaller drafter lacks two tokens.
        prompts = ["Hello there"] if target == speaking else ["Hello there", [5, 119, 100, 7]]
        with engine(target, method="autoregressive") as ours:
            expected = [ours.generate(prompt, greedy(NEW)).token_ids for prompt in prompts]
        for options in ({"budget": 16}, {"method": "speculative", "tree": 6}):
            with engine(target, draft=drafter, **options) as ours:
                found = [ours.generate(prompt, greedy(NEW)).token_ids for prompt in prompts]
            assert found == expected


def test_a_budget_beyond_the_device_is_refused_with_numbers(tiny) -> None:
    path, _ = tiny("llama")
    for budget in (10**9, 4000):
        with pytest.raises(DoesNotFitError, match=f"retrieval budget of {budget} tokens") as caught:
            engine(path, "chosen", budget=budget, device_memory=2_600_000, max_context=500)
        assert caught.value.needed_bytes > caught.value.available_bytes
    # Nobody asked for the default: it shrinks to what fits, and says so.
    with engine(path, "chosen", device_memory=2_600_000, max_context=500) as ours:
        stats = ours.generate(random_ids(400), greedy(20)).stats
    assert stats["memory"]["device_peak_bytes"] <= 2_600_000


@pytest.mark.slow
def test_a_failed_copy_of_a_chunk_is_an_error_and_the_next_request_is_right(
    tiny, monkeypatch
) -> None:
    path, _ = tiny("llama")
    from triforce_offload.link.emulated import EmulatedLink
    from triforce_offload.memory.host import HostMemory

    fails = {"at": None, "copies": 0}

    class Failing(EmulatedLink):
        def to_device(self, device, host, after, what=None):
            event = super().to_device(device, host, after, what)
            fails["copies"] += 1
            if fails["copies"] == fails["at"]:
                self.wait(event)
                event.error = OSError("planted")
            return event

    monkeypatch.setattr(
        "triforce_core.loading.load.open_link", lambda *_: (Failing(), HostMemory())
    )
    prompt = random_ids(PROMPT)
    with engine(path, draft="none", draft_tokens=4, budget=16) as ours:
        memory = ours.runtime.memory
        before = memory.available_bytes
        expected = ours.generate(prompt, greedy()).token_ids
        total = fails["copies"]
        for at in range(1, total, max(1, total // 12)):
            fails.update(at=at, copies=0)
            with pytest.raises(LinkError, match="planted"):
                ours.generate(prompt, greedy())
            assert memory.available_bytes == before
        fails["at"] = None
        assert ours.generate(prompt, greedy()).token_ids == expected


def test_damaged_weights_are_an_error_at_every_level(tiny, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    make_model("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].fill_(float("nan"))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    sound, _ = tiny("llama")
    for model, options in (
        (tmp_path, {"draft": "none"}),
        (tmp_path, {"accept": "coupled"}),
        (sound, {"draft": tmp_path, "draft_tokens": 4, "inner_draft_tokens": 3}),
        (sound, {"draft": tmp_path, "method": "speculative"}),
    ):
        with engine(model, **options) as ours, pytest.raises(CheckpointError, match="not finite"):
            ours.generate(random_ids(20), SamplingParams(20, seed=0))
