"""C2: a context that was saved goes on as the one it was made of; S1: only its own model's."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, make_model, placed, random_ids
from kept_files import with_sums
from oracle import assert_equal_but_for_ties
from safetensors.torch import load_file, save_file

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.snapshot import Snapshot
from triforce_core.requests import pool
from triforce_offload.errors import OutputError, UsageError
from triforce_offload.kv.windows import shape

PROMPT = random_ids(90)
FIRST, NEXT = 30, 25


def engine(path: Path, placement: str = "kv-in-part", **options: object) -> Engine:
    settings = {"device": "cpu", "max_context": 200, "block_tokens": BLOCK, "budget": 32}
    settings |= {"accept": "coupled", "draft_tokens": 4}
    settings = placed(placement, settings | options)
    settings["placement"] = settings["placement"].with_slots()
    return Engine.from_pretrained(path, **settings)


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "exaone4-windows",
        "mistral-windows",
        "qwen3_5",
        "lfm2",
        "qwen3_moe",
        "nemotron_h-moe",
    ],
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_was_saved_goes_on_as_it_would_have(
    tiny, tmp_path, family: str, placement: str
) -> None:
    """Sampled, with drafts, at any placement: of a seed that says the text alone, the same text."""
    path, _ = tiny(family)
    saved = tmp_path / "context.safetensors"
    params = SamplingParams(NEXT, temperature=0.8, seed=7)
    with engine(path, placement) as first:
        begun = first.generate(PROMPT, SamplingParams(FIRST, temperature=0.8, seed=3)).token_ids
        kept = first.save_context(saved)
        longer = [*PROMPT, *begun, 5, 6, 7]
        expected = first.generate(longer, params)
    assert kept == len(PROMPT) + FIRST - 1
    with engine(path, placement) as other:
        assert other.load_context(saved).tokens == kept
        found = other.generate(longer, params)
        assert other.save_context(tmp_path / "again") == len(longer) + NEXT - 1
    assert found.token_ids == expected.token_ids
    assert found.stats["reused_tokens"] == expected.stats["reused_tokens"] == kept


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("saves", "loads"), [("resident", "kv"), ("both-one-slot", "resident")])
@pytest.mark.parametrize("kv", ["dense", "split"])
def test_it_may_be_loaded_where_other_things_stream(
    tiny, tmp_path, saves: str, loads: str, kv: str
) -> None:
    path, _ = tiny("llama")
    saved, params = tmp_path / "context", SamplingParams(NEXT, temperature=0)
    options = {"kv": kv, "dtype": "bfloat16" if kv == "split" else "float32"}
    texts = []
    with engine(path, saves, **options) as first:
        first.generate(PROMPT, SamplingParams(1))
        first.save_context(saved)
        texts.append(first.generate([*PROMPT, 9], params).token_ids)
    for where, form in ((loads, kv), (saves, "dense")):
        with engine(path, where, **options | {"kv": form}) as other:
            other.load_context(saved)
            result = other.generate([*PROMPT, 9], params)
            assert result.stats["reused_tokens"] == len(PROMPT)
            texts.append(result.token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_scores_of_other_chunks_are_not_taken_over(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    with engine(path, chunk_size=8) as first:
        first.generate(PROMPT, SamplingParams(1))
        first.save_context(tmp_path / "context")
    for options in ({"chunk_size": 16}, {"chunk_size": 4}):
        with engine(path, **options) as other:
            other.load_context(tmp_path / "context")
            assert other._contexts.latest.levels.scores.sums.count_nonzero() == 0
            result = other.generate([*PROMPT, 3], SamplingParams(6))
            assert result.stats["reused_tokens"] == len(PROMPT)


@pytest.mark.parametrize("placement", ["resident", "kv"])
def test_scores_of_chunks_go_on_from_what_was_saved(tiny, tmp_path, placement: str) -> None:
    """Without them a loaded context drafts by the last pass alone, until mass has added up."""
    path, _ = tiny("llama")
    saved = tmp_path / "context"
    with engine(path, placement, chunk_size=8) as first:
        first.generate(PROMPT, SamplingParams(FIRST, temperature=0.8, seed=3))
        kept = first.save_context(saved)
        chunks = kept // 8
        expected = first._contexts.latest.levels.scores.sums[..., :chunks].clone()
    assert expected.count_nonzero() == expected.numel()
    with engine(path, placement, chunk_size=8) as other:
        other.load_context(saved)
        sums = other._contexts.latest.levels.scores.sums
        assert torch.equal(sums[..., :chunks], expected)
        assert sums[..., chunks:].count_nonzero() == 0


def test_dynamic_rope_reuses_nothing_of_a_saved_context_of_another_length(tiny, tmp_path) -> None:
    """Beyond the trained positions the keys of a text depend on its length."""
    path, _ = tiny("dynamic-rope")
    saved, params = tmp_path / "context", SamplingParams(8, temperature=0)
    with engine(path) as first:
        first.generate(PROMPT, SamplingParams(1))
        first.save_context(saved)
    prompt = [*PROMPT[:40], 3]
    with engine(path) as other:
        fresh = other.generate(prompt, params, reuse=False)
        other.load_context(saved)
        found = other.generate(prompt, params)
        assert found.stats["reused_tokens"] == 0
        assert found.token_ids == fresh.token_ids
        # One that all of it would rotate alike is reused.
        first_part = tmp_path / "short"
        other.generate(PROMPT[:50], SamplingParams(1))
        other.save_context(first_part)
        other.load_context(first_part)
        assert other.generate(prompt, params).stats["reused_tokens"] == 40


def test_another_prompt_keeps_what_it_shares(tiny, tmp_path) -> None:
    path, _ = tiny("qwen3")
    with engine(path) as first:
        first.generate(PROMPT, SamplingParams(1))
        first.save_context(tmp_path / "context")
    prompt = [*PROMPT[:40], *random_ids(30, 1)]
    with engine(path) as other:
        fresh = other.generate(prompt, SamplingParams(8, temperature=0))
        other.load_context(tmp_path / "context")
        found = other.generate(prompt, SamplingParams(8, temperature=0))
    assert found.stats["reused_tokens"] == 40
    assert found.token_ids == fresh.token_ids


def test_windows_that_were_saved_with_a_context_are_lengths_to_which_it_is_cut(
    tiny, tmp_path, monkeypatch
) -> None:
    """In an engine for shorter contexts, too. What a mark reaches is reused, and no more."""
    monkeypatch.setattr(shape, "SPARE_TOKENS", 1)
    monkeypatch.setattr(shape, "ROOM_TOKENS", 2)
    path, twin = tiny("exaone4-windows")
    saved = tmp_path / "context"
    with engine(path) as first:
        begun = first.generate(PROMPT, SamplingParams(FIRST, temperature=0)).token_ids
        first.save_context(saved)
    lengths = load_file(saved)["marks"].tolist()
    assert lengths == [len(PROMPT), len(PROMPT) + FIRST - 1]
    with engine(path, max_context=160) as other:
        for shared, kept in ((len(PROMPT) + 9, len(PROMPT)), (40, 0)):
            other.load_context(saved)
            prompt = [*PROMPT, *begun][:shared] + random_ids(20, 8)
            found = other.generate(prompt, SamplingParams(8, temperature=0))
            assert found.stats["reused_tokens"] == kept
            theirs = twin.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
            expected = theirs[0, len(prompt) :].tolist()
            assert_equal_but_for_ties(twin, prompt, found.token_ids, expected)


def test_windows_of_older_files_are_read(tiny, tmp_path) -> None:
    """They have keys and values in a dimension of their own."""
    path, _ = tiny("exaone4-windows")
    saved, older = tmp_path / "context", tmp_path / "older"
    with engine(path) as running:
        running.generate(PROMPT, SamplingParams(1))
        running.save_context(saved)
        expected = running.generate([*PROMPT, 9], SamplingParams(8, temperature=0)).token_ids
        whole, parts = saved.read_bytes(), load_file(saved)
        about = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
        parts["window.0"] = parts["window.0"].unflatten(0, (-1, 2)).contiguous()
        save_file(parts, older, metadata=about)
        older.write_bytes(with_sums(older.read_bytes()))
        assert running.load_context(older).tokens == len(PROMPT)
        found = running.generate([*PROMPT, 9], SamplingParams(8, temperature=0))
    assert found.token_ids == expected
    assert found.stats["reused_tokens"] == len(PROMPT)


def _check_refusals(
    running: Engine, path: Path, about: dict[str, str], cases: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Each case's sentence refuses a file with these tensors, and the engine goes on."""
    for sentence, tensors in cases.items():
        content = {name: tensor.contiguous() for name, tensor in tensors.items()}
        content["checksums"] = torch.zeros(len(content), dtype=torch.int64)
        save_file(content, path, metadata=about)
        path.write_bytes(with_sums(path.read_bytes()))
        with pytest.raises(UsageError, match=sentence):
            running.load_context(path)
        assert running.generate(PROMPT, SamplingParams(1)).stats["new_tokens"] == 1, sentence


def test_damaged_windows_are_refused_in_a_sentence(tiny, tmp_path) -> None:
    path, _ = tiny("exaone4-windows")
    saved, damaged = tmp_path / "context", tmp_path / "damaged"
    with engine(path) as running:
        running.generate(PROMPT, SamplingParams(1))
        running.save_context(saved)
        whole, parts = saved.read_bytes(), load_file(saved)
        about = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
        windows = parts["window.0"]
        cases = {
            "lacks marks": {n: t for n, t in parts.items() if n != "marks"},
            "lacks window.0": {n: t for n, t in parts.items() if n != "window.0"},
            "lacks window.1": parts | {"marks": torch.tensor([89, 90])},
            r"marks at \[91\] of 90": parts | {"marks": torch.tensor([91])},
            r"marks at \[\] of 90": parts | {"marks": torch.tensor([], dtype=torch.int64)},
            "does not hold 90 tokens": parts | {"window.0": windows[..., :9, :].contiguous()},
            "window.0 of the context": parts | {"window.0": windows[:1].clone()},
            "marks of the context": parts | {"marks": torch.tensor([[90]])},
            "marks of the context in .* is F32": parts | {"marks": torch.tensor([90.0])},
        }
        _check_refusals(running, damaged, about, cases)


def test_damaged_states_are_refused_in_a_sentence(tiny, tmp_path) -> None:
    path, _ = tiny("qwen3_5")
    saved, damaged = tmp_path / "context", tmp_path / "damaged"
    with engine(path) as running:
        running.generate(PROMPT, SamplingParams(1))
        running.save_context(saved)
        whole, parts = saved.read_bytes(), load_file(saved)
        about = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
        cases = {
            "lacks state_marks": {n: t for n, t in parts.items() if n != "state_marks"},
            "lacks state.0": {n: t for n, t in parts.items() if n != "state.0"},
            "lacks key_inputs.0": {n: t for n, t in parts.items() if n != "key_inputs.0"},
            "state 0 of the context in .* does not hold 90 tokens": parts
            | {"state_keys.0": parts["state_keys.0"][:, :, 1:]},
            "state_updates.0 of the context": parts
            | {"state_updates.0": parts["state_updates.0"][:, :, 1:]},
            "state.0 of the context in .* is BF16": parts
            | {"state.0": parts["state.0"].bfloat16()},
        }
        _check_refusals(running, damaged, about, cases)


def test_a_new_context_is_its_owners_alone_to_read(tiny, tmp_path) -> None:
    """It holds a conversation. One that is replaced keeps the mode that somebody gave it."""
    path, _ = tiny("llama")
    saved, before = tmp_path / "context", os.umask(0o022)
    try:
        with engine(path) as first:
            first.generate(PROMPT, SamplingParams(1))
            first.save_context(saved)
            assert stat.S_IMODE(saved.stat().st_mode) == 0o600
            saved.chmod(0o640)
            first.save_context(saved)
            assert stat.S_IMODE(saved.stat().st_mode) == 0o640
    finally:
        os.umask(before)


def test_a_context_of_another_model_or_kind_is_refused(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    saved = tmp_path / "context"
    with engine(path) as first:
        with pytest.raises(UsageError, match="nothing was read yet"):
            first.save_context(saved)
        first.generate(PROMPT, SamplingParams(1))
        first.save_context(saved)
        with pytest.raises(OutputError, match="cannot write the context to"):
            first.save_context(tmp_path / "missing" / "context")
    make_model("llama", tmp_path / "twin", initializer_range=0.31)
    with engine(tmp_path / "twin") as other:
        with pytest.raises(UsageError, match=r"the context in .* is another model's"):
            other.load_context(saved)
        with pytest.raises(UsageError, match="there is no such file"):
            other.load_context(tmp_path / "none")
    with engine(path, dtype="bfloat16") as half:
        with pytest.raises(UsageError, match=r"kv.0 of the context in .* is F32 .* is BF16"):
            half.load_context(saved)
        assert half.generate(PROMPT, SamplingParams(2)).stats["new_tokens"] == 2
    with (
        engine(path, max_context=50) as short,
        pytest.raises(UsageError, match="has 90 tokens, and the engine takes 50"),
    ):
        short.load_context(saved)


def test_a_file_that_is_cut_while_it_is_read_is_refused(tiny, tmp_path, monkeypatch) -> None:
    path, _ = tiny("llama")
    saved = tmp_path / "context"
    with engine(path) as running:
        expected = running.generate(PROMPT, SamplingParams(8, temperature=0)).token_ids
        running.save_context(saved)
        restore = pool.restore

        def cut(context: Context, snapshot: Snapshot) -> None:
            os.truncate(saved, saved.stat().st_size // 2)
            restore(context, snapshot)

        monkeypatch.setattr(pool, "restore", cut)
        with pytest.raises(UsageError, match=r"cannot read a context from .*the file ends before"):
            running.load_context(saved)
        again = running.generate(PROMPT, SamplingParams(8, temperature=0))
        assert again.token_ids == expected


@pytest.mark.parametrize("seed", range(20))
def test_one_bit_of_what_was_saved_is_enough_to_be_refused(tiny, tmp_path, seed: int) -> None:
    """Numbers that are no others' by their shape give another text without a word."""
    path, _ = tiny("llama")
    saved = tmp_path / "context"
    with engine(path) as running:
        running.generate(PROMPT, SamplingParams(1))
        running.save_context(saved, {"about": "text"})
        whole = bytearray(saved.read_bytes())
        bit = random.Random(seed).randrange(8 * len(whole))
        whole[bit // 8] ^= 1 << bit % 8
        saved.write_bytes(whole)
        with pytest.raises(UsageError):
            running.load_context(saved)
        # The context at hand is still there.
        again = running.generate(PROMPT, SamplingParams(1))
        assert again.stats["reused_tokens"] == len(PROMPT) - 1


def test_damaged_files_are_refused_in_a_sentence(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    saved, damaged = tmp_path / "context", tmp_path / "damaged"
    with engine(path) as running:
        running.generate(PROMPT, SamplingParams(1))
        running.save_context(saved)
        whole, parts = saved.read_bytes(), load_file(saved)
        head = int.from_bytes(whole[:8], "little")
        about = json.loads(whole[8 : 8 + head])["__metadata__"]
        cases: dict[str, bytes | dict[str, torch.Tensor]] = {
            "empty": b"",
            "cut": whole[: len(whole) // 2],
            "noise": b"\x93" * 100,
            "without a layer": {n: t for n, t in parts.items() if n != "kv.1"},
            "without tokens": {n: t for n, t in parts.items() if n != "tokens"},
            "no such token": parts | {"tokens": parts["tokens"] + 10**6},
            "fewer tokens": parts | {"tokens": parts["tokens"][:-1]},
            "scores of another shape": parts | {"scores": parts["scores"][:1].clone()},
        }
        for name, content in cases.items():
            if isinstance(content, bytes):
                damaged.write_bytes(content)
            else:
                content["checksums"] = torch.zeros(len(content), dtype=torch.int64)
                save_file(content, damaged, metadata=about)
                damaged.write_bytes(with_sums(damaged.read_bytes()))
            with pytest.raises(UsageError, match="damaged") as refused:
                running.load_context(damaged)
            # Of the case itself, and not of its checksums.
            assert "checksum" not in str(refused.value)
            assert running.generate(PROMPT, SamplingParams(1)).stats["new_tokens"] == 1, name
