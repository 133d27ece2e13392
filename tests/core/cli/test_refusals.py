"""What cannot be is refused before anything slow is loaded, and nothing is written over."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from byte_level_files import write_byte_level
from command import GREEDY, run

from triforce_core import Engine


def test_what_can_be_refused_is_refused_before_torch_is_loaded(tiny, tmp_path) -> None:
    path = write_byte_level(tiny, tmp_path / "m.gguf", "llama-bpe")
    (tmp_path / "long").write_text("again " * 5000)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from triforce_core.cli.main import main\n"
        f"sys.exit(main(['generate', {str(path)!r}, '--prompt-file', {str(tmp_path / 'long')!r}]))"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "positions the model has" in ended.stderr


@pytest.mark.parametrize("option", ["--stats", "--trace"])
def test_a_model_is_not_written_over(speaking, tmp_path, capsys, option: str) -> None:
    for given in ((speaking, speaking), (speaking, tmp_path / "drafter")):
        if not given[1].exists():
            shutil.copytree(speaking, given[1])
        for file in ("config.json", "model.safetensors"):
            before = (given[1] / file).read_bytes()
            arguments = (given[0], "-p", "x", "--draft", given[1], option, given[1] / file)
            code, _, err = run(capsys, "generate", *arguments, *GREEDY)
            assert code == 2
            assert "belongs to" in err
            assert (given[1] / file).read_bytes() == before
    shape = speaking / "config.json"
    code, _, err = run(capsys, "plan", shape, "--gpu", "rtx4090", "--save", shape)
    assert code == 2
    assert "and for the input" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "{model}", "-p", "x", "--threads", "100000"), "on this machine, got 100000"),
        (("generate", "{model}", "-p", "x", "--threads", "99999999999"), "on this machine, got"),
        (("generate", "{model}", "-p", "x", "--draft", "ngrm"), "no file or directory ngrm"),
        (("generate", "{model}", "-p", "x", "-c", "100000"), "--ctx-size 100000 is more than"),
        (("serve", "{model}", "-c", "50000"), "--ctx-size 50000 is more than the 512 positions"),
        (("chat", "{model}", "-c", "50000"), "--ctx-size 50000 is more than the 512 positions"),
        (
            ("generate", "{model}", "--prompt-file", "/dev/zero"),
            "from /dev/zero: it is larger than",
        ),
        (("generate", "{model}", "--messages", "/dev/zero"), "from /dev/zero: it is larger than"),
        (
            ("generate", "{model}", "--prompts-file", "/dev/zero", "--output", "/dev/null"),
            "prompts from /dev/zero: it is larger than",
        ),
        (
            ("generate", "{model}", "--prompts-file", "{lines}", "--output", "/dev/full"),
            "cannot write the answers to /dev/full: it is no file",
        ),
        (("generate", "{model}", "-p", "x", "--load-context", "/none"), "/none: No such file"),
        (("generate", "{model}", "-p", "x", "--load-context", "{lines}"), "holds no context"),
        (("chat", "{model}", "--load", "/none"), "cannot read a context from /none: No such file"),
        (("plan", "llama2-7b", "--gpu", "rtx4090", "--context", "0"), "2 tokens or more, got 0"),
        (("plan", "llama2-7b", "--gpu", "rtx4090", "--context", "-5"), "2 tokens or more, got -5"),
    ],
)
def test_what_cannot_be_is_refused_early(
    speaking, tmp_path, monkeypatch, capsys, arguments, said: str
) -> None:
    # A device that never ends is read so far.
    monkeypatch.setattr("triforce_core.cli.terminal.reading.MOST_BYTES", 1 << 20)
    (tmp_path / "lines").write_text("One\nTwo\n")
    names = {"{model}": str(speaking), "{lines}": str(tmp_path / "lines")}
    code, out, err = run(capsys, *(names.get(a, a) for a in arguments))
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_a_plans_drafter_is_not_written_over(speaking, tmp_path, capsys) -> None:
    shutil.copytree(speaking, drafter := tmp_path / "drafter")
    base = ("generate", speaking, "-p", "x", *GREEDY)
    with Engine.from_pretrained(speaking, device="cpu", draft=drafter, max_context=64) as engine:
        engine.plan.write(tmp_path / "plan.json")
    code, _, err = run(
        capsys, *base, "--plan", tmp_path / "plan.json", "--stats", drafter / "config.json"
    )
    assert code == 2
    assert "belongs to" in err


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("401 Client Error. (Request ID: 1)\n\nCannot access gated repo for url u.\nMore", "gated"),
        ("Cannot find a snapshot.\nMore", "Cannot find a snapshot."),
        ("503 Server Error. (Request ID: 1)", "503 Server Error. (Request ID: 1)"),
        ("Got: ConnectError: no name", "hub: ConnectError: no name"),
        ("", "OSError"),
    ],
)
def test_what_the_hub_refuses_is_told(monkeypatch, capsys, said: str, told: str) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(said)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    code, out, err = run(capsys, "generate", "owner/name", "-p", "x")
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert err.startswith("triforce: cannot download owner/name from the hub: ")
    assert told in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--top-p", "2"], "--top-p must be more than 0 and at most 1, got 2.0"),
        (["--temperature", "-1"], "--temperature must be a finite number, 0 or more, got -1.0"),
        (["--device-memory", "10"], "'10' has no unit: write it like 10GiB"),
    ],
)
def test_errors_name_what_was_typed(speaking, capsys, arguments: list[str], said: str) -> None:
    code, _, err = run(capsys, "generate", speaking, "-p", "x", *arguments)
    assert code == 2
    assert err.endswith(f"triforce: {said}\n")


def test_an_unknown_model_is_refused_before_an_empty_message(capsys, monkeypatch) -> None:
    monkeypatch.setattr("triforce_core.cli.run.command.read_stdin", str)
    code, _, err = run(capsys, "run", "nosuch")
    assert code == 2
    assert "no file or directory nosuch" in err
