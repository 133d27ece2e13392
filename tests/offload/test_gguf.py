"""The GGUF reader: equal to the gguf package on sound files, a typed error on all others."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch

from triforce_offload.checkpoint.gguf import SUPPORTED, GGUFArray, GGUFSource
from triforce_offload.errors import CheckpointError, UnsupportedModelError


def write(path, tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("words", ["a", "bc"])
    writer.add_bool("flag", True)
    writer.add_float64("third", 1 / 3)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_every_quantisation_is_read_as_the_gguf_package_reads_it(
    tmp_path, kind, monkeypatch
) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 24, 2 * max(block, 32)
    # Random bytes are sound blocks of every kind; sixteen-bit scales are kept small and finite.
    raw = np.random.default_rng(0).integers(0, 48, (rows, columns // block * block_bytes), np.uint8)
    write(tmp_path / "m.gguf", {"w": (raw, kind)})
    expected = gguf.quants.dequantize(raw, kind).reshape(rows, columns)
    monkeypatch.setattr("triforce_offload.checkpoint.gguf._CHUNK_ELEMENTS", 5 * columns)
    source = GGUFSource(tmp_path / "m.gguf")
    assert source.shape("w") == (rows, columns)
    plain = torch.empty(rows, columns)
    source.read("w", plain)
    np.testing.assert_array_equal(plain.numpy(), expected)
    split = torch.empty(4, 2, 3, columns)
    source.read("w", split.transpose(1, 2))
    np.testing.assert_array_equal(split.numpy(), expected.reshape(4, 3, 2, columns).swapaxes(1, 2))
    half = torch.empty(rows, columns, dtype=torch.bfloat16)
    source.read("w", half)
    assert torch.equal(half, plain.bfloat16())
    source.close()


def test_metadata(tmp_path) -> None:
    write(tmp_path / "m.gguf", {"w": (np.zeros((2, 4), np.float32), None)})
    source = GGUFSource(tmp_path / "m.gguf")
    assert source.metadata["general.architecture"] == "llama"
    assert source.metadata["numbers"].values.tolist() == [1, 2, 3]
    assert source.metadata["words"] == GGUFArray(2, ["a", "bc"])
    assert source.metadata["flag"] is True
    assert source.metadata["third"] == 1 / 3
    source.close()


def test_a_kind_that_is_not_supported_is_named(tmp_path) -> None:
    kind = gguf.GGMLQuantizationType.TQ1_0
    write(tmp_path / "m.gguf", {"w": (np.zeros((2, 54), np.uint8), kind)})
    source = GGUFSource(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match="w is TQ1_0"):
        source.shape("w")


def header(tensors: int, fields: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + rest


def field(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    packed = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return packed + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


NESTED = struct.pack("<IQ", 9, 1) * 40
BAD = {
    "empty": b"",
    "magic": b"GGUX" + bytes(60),
    "version": b"GGUF" + struct.pack("<IQQ", 7, 0, 0),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "short": b"GGUF\x03",
    "many-tensors": header(1 << 60, 0),
    "many-fields": header(0, 1 << 60),
    # What hangs the reader of gguf 0.19: an array that claims 2**40 elements.
    "array": header(0, 1, field("a", 9, struct.pack("<IQ", 4, 1 << 40) + bytes(60))),
    "array-of-strings": header(0, 1, field("a", 9, struct.pack("<IQ", 8, 1 << 40) + bytes(60))),
    "string": header(0, 1, field("a", 8, struct.pack("<Q", 1 << 40) + b"x")),
    "nested": header(0, 1, field("a", 9, NESTED)),
    "value-type": header(0, 1, field("a", 99, bytes(8))),
    "twice": header(0, 2, field("a", 4, bytes(4)) * 2),
    "alignment": header(0, 1, field("general.alignment", 4, bytes(4))),
    "dimensions": header(1, 0, tensor("w", (1,) * 5, 0, 0)),
    "no-elements": header(1, 0, tensor("w", (0, 4), 0, 0)),
    "tensor-type": header(1, 0, tensor("w", (4,), 77, 0)),
    "huge": header(1, 0, tensor("w", (1 << 40, 1 << 40), 0, 0)),
    "past-the-end": header(1, 0, tensor("w", (4,), 0, 1 << 40)),
    "half-a-block": header(1, 0, tensor("w", (33,), 2, 0)),
    "same-tensor": header(2, 0, tensor("w", (1,), 0, 0) * 2),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_a_typed_error_at_once(tmp_path, name: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(BAD[name])
    with pytest.raises(CheckpointError, match=r"bad\.gguf"):
        GGUFSource(path)


def test_a_file_that_was_cut_is_incomplete(tmp_path) -> None:
    path = tmp_path / "m.gguf"
    kind = gguf.GGMLQuantizationType.F32
    write(path, {"a": (np.ones((4, 32), np.float32), kind), "b": (np.ones(32, np.float32), kind)})
    whole = path.read_bytes()
    # The writer fills the last tensor up to the alignment, which needs no bytes here.
    path.write_bytes(whole[:-1])
    said = rf"m\.gguf is incomplete: it has {len(whole) - 1} of the {len(whole)} bytes"
    with pytest.raises(CheckpointError, match=said + ".*download it again"):
        GGUFSource(path)
