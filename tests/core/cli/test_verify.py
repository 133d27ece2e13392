"""`triforce verify` finds what was damaged, and says all of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import pytest
import torch
from command import run
from gguf_files import write_gguf
from helpers import make_model
from safetensors.torch import load_file, save_file

from triforce_core.cli.verify import texts
from triforce_core.settings import EngineConfig
from triforce_kernels import dispatch
from triforce_kernels.dispatch import REFERENCE
from triforce_kernels.host.library import library


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model("llama", tmp_path)
    return tmp_path


def changed(model: Path, **tensors: torch.Tensor | None) -> None:
    """Writes the model's file anew, with other tensors, or without those that are None."""
    path = model / "model.safetensors"
    held = load_file(path) | tensors
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, path)


def found(capsys: pytest.CaptureFixture, model: Path) -> list[str]:
    code, out, err = run(capsys, "verify", model)
    lines = out.splitlines()
    assert code == (0 if lines[-1].endswith("nothing is wrong with it") else 4), err
    return lines


def test_nothing_is_wrong_with_a_whole_model(capsys, model) -> None:
    assert len(found(capsys, model)) == 1
    twin = make_model("llama", model)
    write_gguf(twin, model / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    assert len(found(capsys, model / "m.gguf")) == 1


def test_all_that_is_wrong_is_said(capsys, model) -> None:
    names = list(load_file(model / "model.safetensors"))
    first, second = (
        n for n in names if n.endswith(("0.mlp.up_proj.weight", "1.mlp.up_proj.weight"))
    )
    bad = load_file(model / "model.safetensors")["model.norm.weight"].clone()
    bad[3], bad[5] = float("nan"), float("inf")
    changed(
        model,
        **{first: None, second: torch.zeros(2, 2), "model.norm.weight": bad},
        **{"model.layers.0.extra.weight": torch.zeros(1)},
    )
    lines = found(capsys, model)
    for said in (
        f"lacks {first}",
        f"{second} has shape [2, 2]",
        "2 of 64 numbers of model.norm.weight are not finite",
        "model.layers.0.extra.weight, which a",
    ):
        assert any(said in line for line in lines), (said, lines)
    assert len(lines) == 4


def test_hashes_that_are_recorded(capsys, model) -> None:
    path = model / "model.safetensors"
    good = hashlib.sha256(path.read_bytes()).hexdigest()
    sums = model / "SHA256SUMS"
    sums.write_text(f"{good} *model.safetensors\n")
    assert "nothing is wrong" in found(capsys, model)[0]
    sums.write_text(f"{'0' * 64}  model.safetensors\n")
    assert f"its SHA-256 is {good}, and {'0' * 64} is recorded" in found(capsys, model)[0]
    sums.unlink()
    # As the hub's cache has it.
    blob = model / "blobs" / ("f" * 64)
    blob.parent.mkdir()
    path.rename(blob)
    path.symlink_to(blob)
    assert f"{'f' * 64} is recorded" in found(capsys, model)[0]


def test_tensors_that_two_files_hold_and_files_that_are_none(capsys, model) -> None:
    held = load_file(model / "model.safetensors")
    names = sorted(held)
    for shard, part in (("a", names[:10]), ("b", names[8:])):
        save_file({n: held[n] for n in part}, model / f"{shard}.safetensors")
    weights = {n: ("a" if n in names[:10] else "b") + ".safetensors" for n in names}
    (model / "model.safetensors").unlink()
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    lines = found(capsys, model)
    assert lines == [f"{model}: 2 files hold {name}" for name in names[8:10]]
    (model / "a.safetensors").write_bytes(b"damaged")
    code, out, err = run(capsys, "verify", model)
    assert (code, out) == (4, "")
    assert err.startswith("triforce: ")
    assert "a.safetensors" in err


def test_what_is_no_model_is_usage(capsys, tmp_path) -> None:
    (tmp_path / "x.txt").write_text("x")
    assert run(capsys, "verify", tmp_path / "x.txt")[0] == 2
    assert run(capsys, "verify", tmp_path / "missing")[0] in (2, 4)


@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
def test_texts_by_every_way_of_drafting_are_compared(capsys, monkeypatch, speaking) -> None:
    monkeypatch.setattr(texts, "_NEW_TOKENS", 12)
    command = ("verify", speaking, "--same-bits", "Hello there", "--dtype", "bfloat16")
    code, out, err = run(capsys, *command)
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) == len(texts.WAYS) * len(texts.SETTINGS)
    assert all(": the same text, 12 tokens; " in line for line in lines)

    def other(model: Path, prompt: str, config: EngineConfig, way: dict) -> list[texts.Text]:
        plain = way == texts.PLAIN
        return [texts.Text(name, [1, 2, 3 if plain else 4], 1.0) for name in texts.SETTINGS]

    monkeypatch.setattr(texts, "_texts", other)
    code, out, _ = run(capsys, *command)
    assert code == 1
    assert all(": another text from token 2 on; " in line for line in out.splitlines())


def test_texts_are_not_compared_where_they_may_differ(capsys, monkeypatch, speaking) -> None:
    monkeypatch.setattr(dispatch, "_forced", REFERENCE)
    code, out, err = run(capsys, "verify", speaking, "--same-bits", "Hello there")
    assert (code, out) == (2, "")
    assert "needs the compiled kernels of a CPU" in err
