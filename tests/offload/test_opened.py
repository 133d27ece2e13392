"""Files of a model that are cut short while they are open."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import write_gguf
from helpers import make_model

from triforce_offload.checkpoint.gguf import GGUFSource
from triforce_offload.checkpoint.layer_cache import LayerCache
from triforce_offload.checkpoint.opened import OpenedFile, TensorsFile
from triforce_offload.checkpoint.safetensors import SafetensorsSource
from triforce_offload.errors import CheckpointError


@pytest.mark.parametrize("kind", ["safetensors", "F32", "Q8_0"])
def test_reading_what_was_cut_off_is_an_error(tmp_path, kind: str) -> None:
    model, name = make_model("llama", tmp_path), "model.layers.0.mlp.up_proj.weight"
    file = tmp_path / "model.safetensors"
    if kind != "safetensors":
        file, name = tmp_path / "m.gguf", "blk.0.ffn_up.weight"
        write_gguf(model, file, gguf.GGMLQuantizationType[kind])
    source = GGUFSource(file) if kind != "safetensors" else SafetensorsSource(tmp_path)
    into = torch.empty(source.shape(name))
    source.read(name, into)
    os.truncate(file, 4096)
    with pytest.raises(CheckpointError, match=f"cannot read {name} .*the file ends before it"):
        source.read(name, into)
    source.close()


def test_a_header_that_is_cut_off_while_it_is_read(tmp_path, monkeypatch) -> None:
    """Its file was longer when it was opened."""
    write_gguf(make_model("llama", tmp_path), tmp_path / "m.gguf")
    opened = OpenedFile.__init__

    def cut(self: OpenedFile, path: Path) -> None:
        opened(self, path)
        os.truncate(path, 100)

    monkeypatch.setattr(OpenedFile, "__init__", cut)
    with pytest.raises(CheckpointError, match=r"cannot read the header .*the file ends before it"):
        GGUFSource(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="cannot read"):
        TensorsFile(tmp_path / "model.safetensors")


def test_long_headers_are_read_in_parts(tmp_path, monkeypatch) -> None:
    model = make_model("llama", tmp_path)
    write_gguf(model, tmp_path / "m.gguf")
    whole = GGUFSource(tmp_path / "m.gguf")
    monkeypatch.setattr("triforce_offload.checkpoint.gguf._HEADER_BYTES", 1)
    parts = GGUFSource(tmp_path / "m.gguf")
    assert parts.names() == whole.names()
    assert parts.metadata.keys() == whole.metadata.keys()
    parts.close()
    whole.close()


def test_a_kept_layer_that_was_cut_is_made_anew(tmp_path) -> None:
    cache = LayerCache(tmp_path, "a recipe", [])
    layer = torch.arange(5000).to(torch.uint8)
    cache.write(0, layer)
    (file,) = tmp_path.glob("*/000.safetensors")
    into = torch.zeros_like(layer)
    assert cache.read(0, into)
    assert torch.equal(into, layer)
    assert not cache.read(0, torch.zeros(10, dtype=torch.uint8))
    os.truncate(file, 3000)
    assert not cache.read(0, into)
