"""GGUF files of the hub: which one a name stands for, and what is downloaded."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_files import write_gguf
from helpers import make_model

from triforce_core.model.found import hub
from triforce_core.model.found.hub import Download
from triforce_core.model.found.names import resolve
from triforce_core.model.found.quantisations import files_of
from triforce_core.model.known.hub_ids import gguf_id_of
from triforce_core.model.known.shapes import read_model
from triforce_offload.errors import CheckpointError, UsageError

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
        (["model.safetensors"], "Q4_K_M", "no GGUF file in Q4_K_M, and no GGUF file of a model"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(held, wanted: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        files_of("someone/model", held, wanted)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A hub with one repository. What is downloaded from it into a cache is listed."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache/snapshot"

    def made(held: dict[str, bytes], *, online: bool = True) -> list[str]:
        asked: list[str] = []

        def snapshot_download(
            name: str,
            *,
            allow_patterns: list[str],
            ignore_patterns: list[str] | None = None,
            dry_run: bool = False,
            local_files_only: bool = False,
        ) -> Any:
            def wanted(file: str) -> bool:
                ignored = any(fnmatch.fnmatch(file, each) for each in ignore_patterns or ())
                return not ignored and any(fnmatch.fnmatch(file, each) for each in allow_patterns)

            files = {file: data for file, data in held.items() if wanted(file)}
            if dry_run:
                if not online:
                    raise OSError("no network")
                return [
                    SimpleNamespace(
                        filename=file,
                        file_size=len(data),
                        will_download=not (folder / file).exists(),
                    )
                    for file, data in files.items()
                ]
            if not local_files_only:
                if not online:
                    raise OSError("no network")
                for file, data in files.items():
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    (folder / file).write_bytes(data)
                    asked.append(file)
            elif not folder.exists():
                raise FileNotFoundError(name)
            return str(folder)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        return asked

    return made


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("model")
    write_gguf(make_model("llama", folder), folder / "m.gguf")
    return (folder / "m.gguf").read_bytes()


HEADERS = {"README.md": b"", "config.json": b'{"architectures": ["LlamaForCausalLM"]}'}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("someone/tiny-GGUF", "tiny-Q4_K_M.gguf"),
        ("someone/tiny-GGUF:Q8_0", "q8/tiny-Q8_0-00001-of-00002.gguf"),
        ("hf.co/someone/tiny-GGUF:q8_0", "q8/tiny-Q8_0-00001-of-00002.gguf"),
        ("https://huggingface.co/someone/tiny-GGUF", "tiny-Q4_K_M.gguf"),
        ("someone/tiny-GGUF:tiny-Q4_K_M.gguf", "tiny-Q4_K_M.gguf"),
    ],
)
@pytest.mark.parametrize("headers", [HEADERS, {}])
def test_only_the_files_of_a_quantisation_are_downloaded(
    repository, file: bytes, name: str, found: str, headers: dict[str, bytes]
) -> None:
    """And announced, with their size."""
    weights = {
        "tiny-Q4_K_M.gguf": file,
        "q8/tiny-Q8_0-00001-of-00002.gguf": b"first",
        "q8/tiny-Q8_0-00002-of-00002.gguf": b"second",
        "mmproj-tiny.gguf": b"images",
    }
    asked, said = repository(headers | weights), []

    def announce(download: Download) -> None:
        assert not any(each.endswith(".gguf") for each in asked)
        said.append(download)

    path = resolve(name, announce)
    assert path.is_file()
    assert str(path).endswith(found)
    gguf = [each for each in asked if each.endswith(".gguf")]
    assert gguf == [each for each in weights if each.startswith(found[:10])]
    (download,) = said
    assert download.nbytes == sum(len(weights[each]) for each in gguf)
    assert download.name == f"someone/tiny-GGUF ({gguf[0]})"
    # What is in the cache is found there, with the hub and without it.
    repository(headers | weights, online=False)
    tagged = name.removeprefix("https://").removeprefix("huggingface.co/").removeprefix("hf.co/")
    assert hub.cached(tagged) == path
    if ":" in tagged:
        assert resolve(name, lambda again: pytest.fail(str(again))) == path


def test_a_repository_with_both_kinds_stands_for_safetensors(repository, file: bytes) -> None:
    config = b'{"architectures": ["Nothing"]}'
    repository({"config.json": config, "model.safetensors": b"x", "tiny-Q4_K_M.gguf": file})
    with pytest.raises(CheckpointError, match="Nothing"):
        resolve("someone/tiny")
    assert resolve("someone/tiny:Q4_K_M").name == "tiny-Q4_K_M.gguf"


def test_without_the_hub_it_is_named(repository) -> None:
    repository({}, online=False)
    for name in ("someone/tiny", "someone/tiny:Q4_K_M"):
        with pytest.raises(CheckpointError, match=r"cannot download someone/tiny .*no network"):
            resolve(name)


def test_short_names_with_a_quantisation_stand_for_gguf_files() -> None:
    assert gguf_id_of("qwen3-8b:Q4_K_M") == "unsloth/Qwen3-8B-GGUF:Q4_K_M"
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
