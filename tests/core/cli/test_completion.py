"""What shells complete by: bash runs its script here, zsh only reads its own where it is there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from command import run


@pytest.fixture
def script(capsys: pytest.CaptureFixture, tmp_path: Path) -> Path:
    code, out, err = run(capsys, "completion", "bash")
    assert (code, err) == (0, "")
    path = tmp_path / "triforce.bash"
    path.write_text(out)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["com"], ["completion"]),
        (["generate", "--met"], ["--method"]),
        (["generate", "--method", "s"], ["speculative"]),
        (["generate", "--stats", "ru"], ["run.json"]),
        (["serve", "ru"], ["run.json"]),
        (["plan", "--sweep", ""], ["context", "gpus", "link"]),
    ],
)
def test_bash_completes(script: Path, words: list[str], expected: list[str]) -> None:
    (script.parent / "run.json").touch()
    code = (
        'source "$1"; shift; COMP_WORDS=(triforce "$@"); COMP_CWORD=$#; '
        '_shtab_triforce; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    out = subprocess.run(
        ["bash", "-c", code, "bash", script, *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=script.parent,
    )
    assert out.stdout.split() == expected, out.stderr


def test_zsh_gets_a_script_of_its_own(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "completion", "zsh")
    assert (code, out.startswith("#compdef triforce")) == (0, True)
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n"], input=out, text=True, check=True)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture) -> None:
    code, _, err = run(capsys, "completion", "fish")
    assert (code, "invalid choice" in err) == (2, True)
