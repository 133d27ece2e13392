"""GGUF models in several parts, as llama.cpp's tools and the gguf package write them."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import write_gguf
from helpers import make_model

from triforce_core import Engine, SamplingParams
from triforce_offload.checkpoint.gguf import GGUFSource
from triforce_offload.errors import CheckpointError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file, and the same model in parts of seven tensors."""
    root = tmp_path_factory.mktemp("parts")
    made = make_model("llama", root / "hf")
    write_gguf(made, root / "whole.gguf")
    whole = gguf.GGUFWriter
    try:
        gguf.GGUFWriter = partial(whole, split_max_tensors=7)
        write_gguf(made, root / "tiny.gguf")
    finally:
        gguf.GGUFWriter = whole
    assert len(list(root.glob("tiny-*.gguf"))) > 2
    return root


def parts(root: Path) -> list[Path]:
    return sorted(root.glob("tiny-*.gguf"))


def test_parts_have_the_tensors_of_one_file(model: Path) -> None:
    whole, split = GGUFSource(model / "whole.gguf"), GGUFSource(parts(model)[0])
    assert split.files == parts(model)
    assert split.names() == whole.names()
    for name in whole.names():
        assert split.shape(name) == whole.shape(name)
        tensors = [torch.empty(whole.shape(name)) for _ in range(2)]
        for source, into in zip((whole, split), tensors, strict=True):
            source.read(name, into)
        assert torch.equal(*tensors), name
    split.close()
    whole.close()


def test_parts_generate_the_text_of_one_file(model: Path) -> None:
    texts = []
    for path in (model / "whole.gguf", parts(model)[0]):
        with Engine.from_pretrained(path, device="cpu", max_context=64) as engine:
            texts.append(engine.generate([1, 2, 3], SamplingParams(20, temperature=0)).token_ids)
    assert texts[0] == texts[1]


def copied(model: Path, into: Path) -> list[Path]:
    return [Path(shutil.copy(path, into)) for path in parts(model)]


def test_what_is_wrong_with_parts_is_said(model: Path, tmp_path: Path) -> None:
    first, second, third, *_ = copied(model, tmp_path)
    count = len(parts(model))
    with pytest.raises(CheckpointError, match=f"give its first part, {first}"):
        GGUFSource(second)
    third.unlink()
    with pytest.raises(CheckpointError, match=f"cannot read {third}"):
        GGUFSource(first)
    shutil.copy(second, third)
    with pytest.raises(CheckpointError, match=f"{third} is not part 3 of {first}"):
        GGUFSource(first)
    renamed = first.rename(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match=f"is one of {count} parts, whose name should end"):
        GGUFSource(renamed)
