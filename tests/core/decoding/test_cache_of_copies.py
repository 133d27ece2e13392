"""The cache of draft copies on disk: damaged, full, killed while it is written."""

from __future__ import annotations

import io
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, make_model, random_ids
from safetensors import safe_open

from triforce_core import Engine, SamplingParams
from triforce_offload.checkpoint import layer_cache
from triforce_offload.checkpoint.layer_cache import LayerCache
from triforce_offload.files import cache_directory

PROMPT, NEW = random_ids(75), 40
GREEDY = SamplingParams(NEW, temperature=0)


def engine(path: Path, **options: object) -> Engine:
    common = {"device": "cpu", "max_context": 120, "block_tokens": BLOCK}
    return Engine.from_pretrained(path, **common | {"budget": 32, "draft_tokens": 5} | options)


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """Where draft copies are kept, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_directory() / "layers"


def test_what_was_made_is_read_again(tmp_path, kept, monkeypatch) -> None:
    path = tmp_path / "model"
    make_model("llama", path)
    made = []

    def counting(exact: torch.Tensor, into, *rest) -> None:
        made.append(into)
        original(exact, into, *rest)

    from triforce_offload.weights import draft_copies

    original = draft_copies._quantise_into
    monkeypatch.setattr(draft_copies, "_quantise_into", counting)
    options = {"placement": PLACEMENTS["int4"], "draft_tokens": 4, "accept": "coupled"}
    lengths = []
    for _ in range(2):
        with engine(path, **options) as drafting:
            lengths.append(drafting.generate(PROMPT, GREEDY).stats["acceptance"])
        assert len(made) == 12, "four matrices of each of three layers, once"
    assert lengths[0] == lengths[1]
    (directory,) = kept.iterdir()
    assert sorted(file.name for file in directory.iterdir()) == [
        f"{layer:03d}.safetensors" for layer in range(3)
    ]
    # Of another precision they are others; of weights that changed the old ones go.
    with engine(path, dtype="bfloat16", **options):
        assert len(made) == 24
    assert len(list(kept.iterdir())) == 2
    with engine(path, copy_bits=3, **options):
        # Groups of 3 bits do not divide the 96 columns of one matrix of each.
        assert len(made) == 33
    assert len(list(kept.iterdir())) == 3
    make_model("llama", path, initializer_range=0.2)
    with engine(path, **options):
        assert len(made) == 45
    assert len(list(kept.iterdir())) == 3
    assert directory not in kept.iterdir()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("damage", ["cut", "empty", "other", "folder"])
def test_a_damaged_cache_counts_for_nothing(tmp_path, kept, damage: str) -> None:
    path = tmp_path / "model"
    make_model("llama", path)
    options = {"placement": PLACEMENTS["int4"]}
    with engine(path, **options) as drafting:
        expected = drafting.generate(PROMPT, GREEDY).stats["acceptance"]
    (directory,) = kept.iterdir()
    file = directory / "001.safetensors"
    whole = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes({"cut": whole[:-5], "empty": b"", "other": whole[:8] + b"x" * 99}[damage])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with engine(path, **options) as drafting:
            assert drafting.generate(PROMPT, GREEDY).stats["acceptance"] == expected
    assert damage == "folder" or file.read_bytes() == whole


@pytest.mark.parametrize("fault", ["full", "no directory"])
def test_a_cache_that_cannot_be_written_warns_once(tmp_path, kept, monkeypatch, fault: str) -> None:
    path = tmp_path / "model"
    make_model("llama", path)
    options = {"placement": PLACEMENTS["int4"]}
    with engine(path, method="autoregressive") as plain:
        expected = plain.generate(PROMPT, GREEDY).token_ids
    if fault == "full":

        class Full(io.FileIO):
            def write(self, data: bytes) -> int:
                super().write(data[: len(data) // 2])
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(layer_cache, "open", Full, raising=False)
    else:
        kept.parent.parent.mkdir()
        kept.parent.touch()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with engine(path, **options) as drafting:
            assert drafting.generate(PROMPT, GREEDY).token_ids == expected
    messages = [str(w.message) for w in warned if issubclass(w.category, RuntimeWarning)]
    assert len(messages) == 1
    assert "draft copies are made anew in each run" in messages[0]
    if fault == "full":
        assert [file for file in kept.rglob("*") if file.is_file()] == []


KILLED = """
import sys
from pathlib import Path
import torch
from triforce_offload.checkpoint.layer_cache import LayerCache
cache = LayerCache(Path(sys.argv[1]), "test", [Path(sys.argv[2])])
print("begun", flush=True)
for layer in range(10_000):
    cache.write(layer, torch.full((1 << 20,), layer % 251, dtype=torch.uint8))
"""


@pytest.mark.slow
def test_killed_while_writing_it_leaves_nothing_that_is_wrong(tmp_path) -> None:
    """K2, in small."""
    root, source, generator = tmp_path / "kept", tmp_path / "weights", random.Random(1)
    source.write_bytes(b"weights")
    into = torch.empty(1 << 20, dtype=torch.uint8)
    written = 0
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(root), str(source)], stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == b"begun\n"
        time.sleep(generator.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        cache = LayerCache(root, "test", [source])
        files = list(root.rglob("*.*"))
        assert all(file.suffix == ".safetensors" for file in files), "no parts are left"
        for layer in range(len(files)):
            assert cache.read(layer, into)
            assert (into == layer % 251).all()
        written = max(written, len(files))
    assert written > 3


def test_parts_that_another_process_is_writing_are_left_alone(tmp_path) -> None:
    source = tmp_path / "weights"
    source.write_bytes(b"weights")
    cache = LayerCache(tmp_path, "test", [source])
    cache.write(0, torch.zeros(8, dtype=torch.uint8))
    (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
    living, dead = (
        directory / f"001.safetensors.{process}.x.partial" for process in (os.getpid(), 2**22 + 5)
    )
    living.touch()
    dead.touch()
    LayerCache(tmp_path, "test", [source])
    assert living.exists()
    assert not dead.exists()
    with safe_open(directory / "000.safetensors", framework="pt") as file:
        assert file.get_tensor("layer").numel() == 8
    with suppress(OSError):
        living.unlink()


def test_no_link_leads_what_is_written_elsewhere(tmp_path, monkeypatch) -> None:
    """Names of parts are not to be guessed, and are made anew."""
    source, victim = tmp_path / "weights", tmp_path / "victim"
    source.write_bytes(b"weights")
    victim.write_bytes(b"precious")
    root = tmp_path / "kept"
    cache = LayerCache(root, "test", [source])
    cache.write(0, torch.zeros(8, dtype=torch.uint8))
    (directory,) = root.iterdir()
    (directory / f"001.safetensors.{os.getpid()}.partial").symlink_to(victim)
    names, mkstemp = [], tempfile.mkstemp

    def recorded(**options: str) -> tuple[int, str]:
        made = mkstemp(**options)
        status = os.lstat(made[1])
        assert stat.S_ISREG(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        names.append(made[1])
        return made

    monkeypatch.setattr(tempfile, "mkstemp", recorded)
    into = torch.empty(8, dtype=torch.uint8)
    for value in (1, 2):
        cache.write(1, torch.full((8,), value, dtype=torch.uint8))
        assert cache.read(1, into)
        assert (into == value).all()
    assert victim.read_bytes() == b"precious"
    assert len(set(names)) == 2
