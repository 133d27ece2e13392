"""Models on this machine: what is found, what a name stands for, and what a download says first."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import run
from gguf_files import write_gguf
from helpers import add_tokenizer, make_model

from triforce_core.loading.open_model import OpenModel
from triforce_core.model.found import folders, hub, ollama
from triforce_core.model.found.models import Described, found_models
from triforce_core.model.found.names import resolve
from triforce_core.model.known.shapes import read_model
from triforce_offload.errors import UsageError
from triforce_offload.machine.hardware import Gpu, inspect_machine

OLLAMA = "application/vnd.ollama.image."


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tiny model as a directory and as a GGUF file."""
    root = tmp_path_factory.mktemp("sound")
    model = make_model("llama", root / "hf")
    add_tokenizer(root / "hf")
    write_gguf(model, root / "tiny.gguf")
    return root


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ollama, "folders", lambda: [tmp_path / ".ollama/models"])
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path


def into_hub(home: Path, hub_id: str, *files: Path) -> Path:
    """Put files into the hub's cache, as its client does."""
    repository = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a" * 40)
    for i, file in enumerate(files):
        blob = repository / "blobs" / str(i)
        blob.parent.mkdir(exist_ok=True)
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def into_ollama(home: Path, place: str, file: Path, kind: str = "model") -> Path:
    """Put a file among Ollama's models. place: registry/namespace/name/tag"""
    root = home / ".ollama/models"
    digest = f"sha256:{abs(hash(place)):064x}"
    manifest = root / "manifests" / place
    manifest.parent.mkdir(parents=True)
    layers = [
        {"mediaType": OLLAMA + "template", "digest": "sha256:0"},
        {"mediaType": OLLAMA + kind, "digest": digest},
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    blob = root / "blobs" / digest.replace(":", "-")
    blob.parent.mkdir(exist_ok=True)
    shutil.copy(file, blob)
    return blob


def named() -> dict[str, str]:
    return {found.name: found.source for found in found_models()}


def test_models_are_found_where_programs_keep_them(home: Path, sound: Path) -> None:
    assert named() == {}
    gguf = sound / "tiny.gguf"
    whole = into_hub(home, "one/whole", *(sound / "hf").iterdir())
    others = [gguf.with_name(name) for name in ("tiny-Q8_0.gguf", "tiny 2.gguf")]
    for other in others:
        # Models differ if their files do, so each is another one.
        other.write_bytes(gguf.read_bytes())
    into_hub(home, "one/quantised", gguf, *others)
    into_hub(home, "one/headers", sound / "hf/config.json")
    into_ollama(home, "registry.ollama.ai/library/tiny/8b", gguf)
    into_ollama(home, "registry.ollama.ai/someone/tiny/latest", gguf)
    into_ollama(home, "hf.co/two/tiny/Q4", gguf)
    into_ollama(home, "registry.ollama.ai/library/adapter/1", gguf, kind="adapter")
    studio = home / ".lmstudio/models/three/tiny"
    studio.mkdir(parents=True)
    shutil.copy(gguf, studio)
    shutil.copy(gguf, studio / "mmproj-tiny.gguf")
    shutil.copytree(sound / "hf", home / "models/tiny")
    shutil.copy(gguf, "beside.gguf")
    assert named() == {
        "one/whole": "Hugging Face",
        "one/quantised:tiny.gguf": "Hugging Face",
        "one/quantised:Q8_0": "Hugging Face",
        "one/quantised:tiny 2.gguf": "Hugging Face",
        "tiny:8b": "Ollama",
        "someone/tiny:latest": "Ollama",
        "hf.co/two/tiny:Q4": "Ollama",
        str(studio / "tiny.gguf"): "LM Studio",
        str(home / "models/tiny"): "~/models",
        "beside.gguf": "here",
    }
    # Every name is one that commands take.
    for found in found_models():
        described = Described.of(found)
        assert (described.family, described.problem) == ("llama", None)
        assert described.nbytes > 10_000
        of_hub = found.source == "Hugging Face"
        assert (hub.cached if of_hub else resolve)(found.name) == found.path
        assert read_model(found.name).config.family == "llama"
    assert resolve("someone/tiny").is_file(), "a tag may be left out"
    assert hub.cached("one/whole") == whole
    assert hub.cached("one/headers") is None


def test_broken_manifests_are_left_out(home: Path, sound: Path) -> None:
    blob = into_ollama(home, "registry.ollama.ai/library/gone/1", sound / "tiny.gguf")
    blob.unlink()
    manifests = home / ".ollama/models/manifests/registry.ollama.ai/library"
    for name, text in (("no_json", "{"), ("a_list", "[]"), ("empty", '{"layers": [{}]}')):
        (manifests / name).mkdir()
        (manifests / name / "latest").write_text(text)
    assert named() == {}


def test_a_file_in_parts_is_one_model(home: Path, sound: Path) -> None:
    for number in (1, 2, 3):
        shutil.copy(sound / "tiny.gguf", f"big-0000{number}-of-00003.gguf")
    (found,) = found_models()
    assert found.name == "big-00001-of-00003.gguf"
    assert found.nbytes == 3 * (sound / "tiny.gguf").stat().st_size


def test_what_does_not_run_says_why(home: Path, sound: Path) -> None:
    shutil.copytree(sound / "hf", "other")
    config = json.loads(Path("other/config.json").read_text())
    config |= {"model_type": "unheard", "architectures": ["UnheardForCausalLM"]}
    Path("other/config.json").write_text(json.dumps(config))
    Path("broken.gguf").write_bytes(b"GGUF" + b"\0" * 50)
    described = {each.found.name: each for each in map(Described.of, found_models())}
    assert described["other"].family is None
    assert "unheard" in described["other"].problem.lower()
    assert described["broken.gguf"].problem


def test_the_list_is_a_table_or_json(home: Path, sound: Path, capsys) -> None:
    def listed(*folders: object) -> list[dict[str, Any]]:
        code, out, _ = run(capsys, "list", "--json", *folders)
        assert code == 0
        return json.loads(out)

    code, out, _ = run(capsys, "list")
    assert (code, "No model was found in" in out) == (0, True)
    assert "\n  the current folder\n" in out
    assert listed() == []
    shutil.copy(sound / "tiny.gguf", "[bold]tiny.gguf")
    into_ollama(home, "registry.ollama.ai/library/tiny/8b", sound / "tiny.gguf")
    _, out, _ = run(capsys, "list")
    assert "[bold]tiny.gguf" in out
    assert "tiny:8b" in out
    assert [(row["name"], row["source"], row["runs"], row["family"]) for row in listed()] == [
        ("tiny:8b", "Ollama", True, "llama"),
        ("[bold]tiny.gguf", "here", True, "llama"),
    ]
    assert {row["name"] for row in listed(sound)} >= {str(sound / "hf"), str(sound / "tiny.gguf")}
    code, _, err = run(capsys, "list", "nowhere")
    assert (code, "nowhere is no folder" in err) == (2, True)


@pytest.mark.parametrize(
    ("gpus", "command"),
    [
        ((), "triforce plan MODEL --gpu rtx4090 says"),
        ((Gpu("A", 1 << 34, 4, 4, 16, 16),), "plan MODEL says"),
    ],
)
def test_the_list_ends_with_a_command_that_works(
    home: Path, sound: Path, capsys, monkeypatch, gpus: tuple[Gpu, ...], command: str
) -> None:
    """A plan for a machine without a GPU needs the name of one."""
    machine = replace(inspect_machine(), gpus=gpus)
    monkeypatch.setattr("triforce_core.cli.list.command.inspect_machine", lambda: machine)
    assert command in run(capsys, "list", sound)[1]


def test_a_model_of_ollamas_opens_by_its_name(home: Path, sound: Path) -> None:
    into_ollama(home, "registry.ollama.ai/library/tiny/latest", sound / "tiny.gguf")
    with OpenModel.at("tiny") as model:
        assert model.checkpoint.config.family == "llama"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle3"])
def test_files_that_are_not_needed_may_be_missing_in_the_cache(
    home: Path, sound: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Newer caches know which files the repository has, and refuse a folder without some."""
    commit, cache = "0" * 40, home / "hub/models--someone--tiny"
    folder = cache / "snapshots" / commit
    shutil.copytree(sound / "hf", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    for part in ("refs", "trees"):
        (cache / part).mkdir()
    (cache / "refs/main").write_text(commit)
    there = [path.name for path in folder.iterdir()]
    names = [*there, "README.md", "pytorch_model.bin"]
    files = {name: {"size": 1, "blob_id": "x"} for name in names}
    tree = {"format_version": 1, "files": files}
    (cache / f"trees/{commit}.json").write_text(json.dumps(tree))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.cached("someone/tiny") == folder
    assert hub.downloaded("someone/tiny", lambda download: pytest.fail(str(download))) == folder


@pytest.mark.parametrize(
    ("architecture", "found"), [("LlamaForCausalLMEagle3", True), ("B", False)]
)
def test_of_files_of_torch_only_heads_are_found_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, found: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert hub.cached("someone/a-head") == (tmp_path if found else None)


def test_unknown_names_are_refused_with_the_nearest(home: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean qwen3-8b\?"):
        resolve("qwen3-8bb")
    with pytest.raises(UsageError, match="is no hub id"):
        resolve("nothing-like-it-at-all")
    for name in ("./missing.gguf", "~/missing", "/missing"):
        with pytest.raises(UsageError, match="there is no file or directory"):
            resolve(name)


def test_deep_and_hidden_folders_are_left_alone(home: Path, sound: Path) -> None:
    for place in ("a/b/c/d", ".hidden"):
        Path(place).mkdir(parents=True)
        shutil.copy(sound / "tiny.gguf", place)
    Path("loop").symlink_to(".")
    assert list(folders.models_in(Path(), 2)) == []
