"""GGUF files of the hub: which one a name stands for, and what is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_hub import FakeHub, fake_hub
from gguf_files import write_gguf
from helpers import make_model

from triforce_core.model.found import hub
from triforce_core.model.found.hub import Download
from triforce_core.model.found.names import resolve, without_site
from triforce_core.model.found.quantisations import files_of
from triforce_core.model.known.hub_ids import gguf_id_of
from triforce_core.model.known.shapes import read_model
from triforce_offload.errors import CheckpointError, DoesNotFitError, UsageError

# As repositories of Unsloth, bartowski, ggml-org and z-lab have them.
UNSLOTH = [
    *("README.md", "config.json", "imatrix_unsloth.gguf_file", "mmproj-BF16.gguf"),
    *("Qwen3.8-27B-Q4_K_M.gguf", "Qwen3.8-27B-Q4_K_S.gguf", "Qwen3.8-27B-IQ4_XS.gguf"),
    *("Qwen3.8-27B-UD-Q4_K_XL.gguf", "Qwen3.8-27B-UD-IQ2_XXS.gguf", "Qwen3.8-27B-Q8_0.gguf"),
    *(f"BF16/Qwen3.8-27B-BF16-0000{part}-of-00002.gguf" for part in (2, 1)),
    "mtp-Qwen3.8-27B.gguf",
]
GPT_OSS = [f"gpt-oss-120b-mxfp4-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
DRAFTER = ["Qwen3.8-27B-DFlash2-Q4_K_M.gguf", "Qwen3.8-27B-DFlash2-BF16.gguf"]


@pytest.mark.parametrize(
    ("held", "wanted", "files"),
    [
        (UNSLOTH, "", ["Qwen3.8-27B-Q4_K_M.gguf"]),
        (UNSLOTH, "q4_k_m", ["Qwen3.8-27B-Q4_K_M.gguf"]),
        (UNSLOTH, "UD-Q4_K_XL", ["Qwen3.8-27B-UD-Q4_K_XL.gguf"]),
        (UNSLOTH, "IQ4_XS", ["Qwen3.8-27B-IQ4_XS.gguf"]),
        (
            UNSLOTH,
            "BF16",
            [f"BF16/Qwen3.8-27B-BF16-0000{part}-of-00002.gguf" for part in (1, 2)],
        ),
        (UNSLOTH, "mtp-Qwen3.8-27B.gguf", ["mtp-Qwen3.8-27B.gguf"]),
        (GPT_OSS, "", GPT_OSS),
        (GPT_OSS, "MXFP4", GPT_OSS),
        (GPT_OSS, GPT_OSS[0], GPT_OSS),
        (DRAFTER, "", DRAFTER[:1]),
        (DRAFTER, "bf16", DRAFTER[1:]),
        (["one.gguf", "mmproj-one.gguf"], "", ["one.gguf"]),
        (["a-IQ3_M.gguf"], "", ["a-IQ3_M.gguf"]),
        # As others name what lies beside a model.
        (["M.i1-IQ3_M.gguf", "M.mmproj-Q8_0.gguf", "M.imatrix.gguf"], "", ["M.i1-IQ3_M.gguf"]),
        (["A.gguf", "A-BF16-mmproj.gguf", "imatrix.gguf"], "", ["A.gguf"]),
        (["g-Q4_K_M.gguf", "g-assistant-Q4_K_M.gguf"], "", ["g-Q4_K_M.gguf"]),
        (["g-assistant-Q8_0.gguf"], "", ["g-assistant-Q8_0.gguf"]),
        (["Eagle-7B-Q4_K_M.gguf"], "Q4_K_M", ["Eagle-7B-Q4_K_M.gguf"]),
        (["M-imatrix-Q4_K_M.gguf"], "q4_k_m", ["M-imatrix-Q4_K_M.gguf"]),
        (["phi-4-Q4_K.gguf", "phi-4-bf16.gguf"], "", ["phi-4-Q4_K.gguf"]),
        (["Q4_K_M/M.gguf", "Q8_0/M.gguf"], "Q8_0", ["Q8_0/M.gguf"]),
        (["a/M-Q8_0.gguf", "b/M-Q8_0.gguf"], "", ["a/M-Q8_0.gguf"]),
        (["M-Q8_0.gguf"], "m-q8_0.GGUF", ["M-Q8_0.gguf"]),
    ],
)
def test_a_quantisation_is_found_among_files(
    held: list[str], wanted: str, files: list[str]
) -> None:
    assert files_of("someone/model", held, wanted) == files


@pytest.mark.parametrize(
    ("held", "wanted", "message"),
    [
        (UNSLOTH, "Q5_K_M", "someone/model has no GGUF file in Q5_K_M; name one as .*: bf16, iq4_"),
        (UNSLOTH, "IQ2_XXS", "ud-iq2_xxs"),
        (UNSLOTH, "other.gguf", "has no file other.gguf"),
        (["a-IQ3_M.gguf", "a-IQ2_M.gguf"], "", "several GGUF files; .*: iq2_m, iq3_m"),
        (["model.safetensors"], "Q4_K_M", "no GGUF file in Q4_K_M, and none of a model"),
        (["mmproj.gguf"], "", "has no GGUF file, and none of a model"),
        (["g-lora-F16.gguf", "g-Q4_K_M.gguf"], "F16", "no GGUF file in F16; name one as .*q4_k_m"),
        (
            ["L-1B-Q8_0.gguf", "L-8B-Q8_0.gguf"],
            "Q8_0",
            "several GGUF files in q8_0; .*: L-1B-Q8_0.gguf, L-8B-Q8_0.gguf",
        ),
        (GPT_OSS[1:], "", "has 2 of the 3 parts of gpt-oss-120b-mxfp4"),
        (["a-00001-of-00002.gguf", "a-00001-of-00003.gguf"], "", "has 1 of the 2 parts of a"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(held, wanted: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        files_of("someone/model", held, wanted)


@pytest.fixture
def hub_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub without models, and an empty cache."""
    with fake_hub(tmp_path / "cache", monkeypatch) as served:
        yield served


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model."""
    folder = tmp_path_factory.mktemp("model")
    make_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file of a tiny model."""
    folder = tmp_path_factory.mktemp("model")
    write_gguf(make_model("llama", folder), folder / "m.gguf")
    return (folder / "m.gguf").read_bytes()


HEADERS = {"README.md": b"", "config.json": b'{"architectures": ["LlamaForCausalLM"]}'}
WHOLE = "https://huggingface.co/someone/tiny-GGUF"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("someone/tiny-GGUF", "tiny-Q4_K_M.gguf"),
        ("someone/tiny-GGUF:Q8_0", "q8/tiny-Q8_0-00001-of-00002.gguf"),
        ("hf.co/someone/tiny-GGUF:q8_0", "q8/tiny-Q8_0-00001-of-00002.gguf"),
        ("hf.co/someone/tiny-GGUF:latest", "tiny-Q4_K_M.gguf"),
        (f"{WHOLE}/", "tiny-Q4_K_M.gguf"),
        (f"{WHOLE}/blob/main/tiny-Q4_K_M.gguf", "tiny-Q4_K_M.gguf"),
        (
            f"{WHOLE}/resolve/main/q8/tiny-Q8_0-00001-of-00002.gguf?download=true",
            "q8/tiny-Q8_0-00001-of-00002.gguf",
        ),
        ("someone/tiny-GGUF:tiny-Q4_K_M.gguf", "tiny-Q4_K_M.gguf"),
    ],
)
@pytest.mark.parametrize("headers", [HEADERS, {}])
def test_only_the_files_of_a_quantisation_are_downloaded(
    hub_with: FakeHub, file: bytes, name: str, found: str, headers: dict[str, bytes]
) -> None:
    """And announced, with their size; then they are found without the hub, in plans too."""
    weights = {
        "tiny-Q4_K_M.gguf": file,
        "q8/tiny-Q8_0-00001-of-00002.gguf": b"first",
        "q8/tiny-Q8_0-00002-of-00002.gguf": b"second",
        "mmproj-tiny.gguf": b"images",
        "tiny-Q2_K.gguf": b"other",
    }
    hub_with.repositories["someone/tiny-GGUF"], said = headers | weights, []

    def announce(download: Download) -> None:
        assert not hub_with.downloads
        said.append(download)

    path = resolve(name, announce)
    assert path.is_file()
    assert str(path).endswith(found)
    assert sorted(hub_with.downloads) == [
        each for each in sorted(weights) if each.startswith(found[:10])
    ]
    (download,) = said
    assert download.nbytes == sum(len(weights[each]) for each in hub_with.downloads)
    assert download.name == f"someone/tiny-GGUF ({found})"
    before = hub_with.requests
    assert resolve(name, lambda again: pytest.fail(str(again))) == path
    # Not one for each file of the repository.
    assert hub_with.requests - before < 8
    hub_with.without_network()
    assert resolve(name, lambda again: pytest.fail(str(again))) == path
    assert hub.cached(without_site(name)) == path
    if found == "tiny-Q4_K_M.gguf":
        assert read_model(name).config.family == "llama"
    others = name.startswith("someone") and ":" in name
    with pytest.raises(CheckpointError, match=r"cannot download .*offline mode"):
        resolve("someone/tiny-GGUF:Q2_K" if others else "someone/other")


def test_a_repository_with_both_kinds_stands_for_safetensors(hub_with: FakeHub, file) -> None:
    config = b'{"architectures": ["Nothing"]}'
    weights = {"model.safetensors": b"x", "tiny-Q4_K_M.gguf": file}
    hub_with.repositories["someone/tiny"] = {"config.json": config} | weights
    with pytest.raises(CheckpointError, match="Nothing"):
        resolve("someone/tiny")
    assert resolve("someone/tiny:Q4_K_M").name == "tiny-Q4_K_M.gguf"


def test_a_download_is_announced_with_its_size_before_it_begins(hub_with: FakeHub, sound) -> None:
    held = {path.name: path.read_bytes() for path in sound.iterdir()}
    hub_with.repositories["Qwen/Qwen3-8B"], said = held | {"pytorch_model.bin": b"x"}, []

    def announce(download: Download) -> None:
        assert "config.json" in hub_with.downloads
        assert "model.safetensors" not in hub_with.downloads
        said.append(download)

    folder = resolve("qwen3-8b", announce)
    assert sorted(path.name for path in folder.iterdir()) == sorted(held)
    (download,) = said
    assert download.name == "Qwen/Qwen3-8B"
    assert download.nbytes == len(held["model.safetensors"])
    assert str(download).startswith("downloading Qwen/Qwen3-8B: ")


def test_a_download_that_the_disk_has_no_room_for_does_not_begin(
    hub_with: FakeHub, sound, monkeypatch
) -> None:
    hub_with.repositories["Qwen/Qwen3-8B"] = {p.name: p.read_bytes() for p in sound.iterdir()}
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=20_000))
    with pytest.raises(DoesNotFitError, match="set HF_HOME to a folder with more room"):
        resolve("Qwen/Qwen3-8B")
    assert "model.safetensors" not in hub_with.downloads


@pytest.mark.parametrize("of_torch", [True, False])
def test_a_head_is_downloaded_in_one_format(hub_with: FakeHub, of_torch: bool) -> None:
    """In torch's own, if there is no other: many heads are published in it alone."""
    held = {"config.json": b'{"architectures": ["LlamaForCausalLMEagle3"]}'}
    held |= {"pytorch_model.bin": b"x"} | ({} if of_torch else {"model.safetensors": b"x"})
    hub_with.repositories["someone/a-head"] = held
    folder = resolve("someone/a-head")
    assert (folder / "pytorch_model.bin").exists() == of_torch
    assert (folder / "model.safetensors").exists() != of_torch


def test_an_incomplete_download_is_no_model(hub_with: FakeHub) -> None:
    """A part that is missing on the hub, or in the cache."""
    held = {f"a-Q8_0-0000{part}-of-00003.gguf": b"x" for part in (1, 3)}
    hub_with.repositories["someone/a"] = held
    with pytest.raises(UsageError, match="someone/a has 2 of the 3 parts of a-Q8_0"):
        resolve("someone/a:Q8_0")
    assert not hub_with.downloads
    hub_with.repositories["someone/b"] = held | {"a-Q8_0-00002-of-00003.gguf": b"x"}
    path = resolve("someone/b")
    (path.parent / "a-Q8_0-00002-of-00003.gguf").unlink()
    assert hub.cached("someone/b") is None


def test_why_a_download_fails_is_said(hub_with: FakeHub) -> None:
    hub_with.repositories["google/gated"] = {"model-Q4_0.gguf": b"x"}
    hub_with.gated.add("google/gated")
    hub_with.repositories["someone/nothing"] = {"README.md": b""}
    refused = {
        "google/gated": "cannot download google/gated .*asks for consent",
        "google/gated:Q4_0": "cannot download google/gated .*asks for consent",
        "nobody/nothing": "there is no such repository, or it is private",
        "nobody/nothing:Q4_K_M": "there is no such repository, or it is private",
        "qwen3-8b:Q4_K_M": "qwen3-8b:Q4_K_M stands for unsloth/Qwen3-8B-GGUF:Q4_K_M",
        "someone/nothing": "has no config.json and no GGUF file",
    }
    for name, message in refused.items():
        with pytest.raises(CheckpointError, match=message):
            resolve(name)
    hub_with.without_network()
    for name in ("someone/tiny", "someone/tiny:Q4_K_M"):
        with pytest.raises(CheckpointError, match=r"cannot download someone/tiny .*offline mode"):
            resolve(name)


def test_a_quantisation_that_plans_do_not_know_is_planned_from_its_file(
    hub_with: FakeHub, file: bytes
) -> None:
    name = "qwen3-8b:UD-Q4_K_XL"
    with pytest.raises(UsageError, match="files in others are planned once they are on this"):
        read_model(name)
    hub_with.repositories["unsloth/Qwen3-8B-GGUF"] = {"Qwen3-8B-UD-Q4_K_XL.gguf": file}
    resolve(name)
    assert read_model(name).config.family == "llama"


def test_short_names_with_a_quantisation_stand_for_gguf_files() -> None:
    assert gguf_id_of("qwen3-8b:Q4_K_M") == "unsloth/Qwen3-8B-GGUF:Q4_K_M"
    assert gguf_id_of("nemotron-3-nano-30b-a3b:Q8_0").endswith("-30B-A3B-GGUF:Q8_0")
    assert gguf_id_of("gpt-oss-20b:F16") == "unsloth/gpt-oss-20b-GGUF:F16"
    # Those of safetensors have names of their own, by many publishers.
    for name in ("qwen3-8b", "qwen3-8b:INT4", "qwen3-8b:fp8", "nothing:Q4_K_M"):
        assert gguf_id_of(name) is None
    usual = read_model("someone/Qwen3-8B-GGUF")
    assert usual.pieces("layers.0.o") == read_model("qwen3-8b:Q4_K_M").pieces("layers.0.o")


@pytest.mark.parametrize(
    "name", ["a/b/c", "a/b.gguf", "./a/b", "../a:Q4_K_M", "~/a", "a/", "/a", "a b/c", "a/b:"]
)
def test_what_is_no_hub_id_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="there is no file or directory"):
        resolve(name)
