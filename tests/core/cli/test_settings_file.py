"""Settings that are kept: a file and variables under the flags."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command import GREEDY, run

from triforce_core.cli.settings_file import settings_path
from triforce_offload.files import cache_directory


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings.toml"
    monkeypatch.setenv("TRIFORCE_SETTINGS", str(path))
    path.write_text("")
    return path


def told(speaking: Path, capsys: pytest.CaptureFixture, tmp_path: Path, *options: object) -> dict:
    stats = tmp_path / "stats.json"
    base = ("generate", speaking, "--prompt", "Hello", "--quiet", "--stats", stats)
    code, _, err = run(capsys, *base, *options)
    assert code == 0, err
    return json.loads(stats.read_text())


def test_flags_are_over_variables_over_the_commands_table_over_the_top(
    speaking, capsys, tmp_path, file, monkeypatch
) -> None:
    file.write_text(
        'method = "autoregressive"\nmax-new-tokens = 3\ndevice = "cpu"\n'
        "[generate]\nmax_new_tokens = 4\n[chat]\nmax-new-tokens = 5\n"
    )
    first = told(speaking, capsys, tmp_path)
    assert (first["method"], first["new_tokens"]) == ("autoregressive", 4)
    monkeypatch.setenv("TRIFORCE_MAX_NEW_TOKENS", "6")
    assert told(speaking, capsys, tmp_path)["new_tokens"] == 6
    assert told(speaking, capsys, tmp_path, "-n", 7)["new_tokens"] == 7


def test_switches_and_lists(speaking, capsys, tmp_path, file) -> None:
    whole = run(capsys, "generate", speaking, "--prompt", "Hello", *GREEDY, "--quiet")[1]
    file.write_text(f'quiet = true\nno-pin = false\nstop = [{json.dumps(whole[3:5])}, "§"]\n')
    code, out, err = run(capsys, "generate", speaking, "--prompt", "Hello", *GREEDY)
    assert (code, err) == (0, "")
    assert out.removesuffix("\n") == whole[: whole.index(whole[3:5])]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "device-memroy = '1GiB'",
            "there is no setting device-memroy (did you mean device-memory?)",
        ),
        ("[generat]\nquiet = true", "there is no command generat (did you mean generate?)"),
        ("[chat]\nprompt = 'x'", "there is no setting prompt"),
        ("quiet = 3", "quiet is true or false, not 3"),
        ("stop = [[1]]", "stop cannot be [1]"),
        ("x = ", "cannot read settings from"),
        ("temperature = 'hot'", "settings.toml: temperature cannot be 'hot'"),
        ("model = 'x'", "model cannot be set here; give it on the command line"),
    ],
)
def test_mistakes_are_named(speaking, capsys, file, content: str, said: str) -> None:
    file.write_text(content)
    command = "chat" if content.startswith("[chat]") else "generate"
    code, _, err = run(capsys, command, speaking)
    assert (code, said in err) == (2, True), err


def test_variables_that_are_no_settings_are_named(speaking, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRIFORCE_DEVICE_MEMROY", "1GiB")
    code, _, err = run(capsys, "generate", speaking, "--prompt", "x")
    assert code == 2
    assert "TRIFORCE_DEVICE_MEMROY (did you mean TRIFORCE_DEVICE_MEMORY?)" in err
    monkeypatch.delenv("TRIFORCE_DEVICE_MEMROY")
    monkeypatch.setenv("TRIFORCE_SETTINGS", str(tmp_path / "none"))
    code, _, err = run(capsys, "generate", speaking, "--prompt", "x")
    assert (code, "there is no such file" in err) == (2, True)


def test_a_file_in_the_usual_place_and_help_without_it(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("TRIFORCE_SETTINGS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "triforce-offload" / "settings.toml"
    path.parent.mkdir()
    path.write_text("nonsense = 1")
    assert run(capsys, "generate", "x", "--prompt", "y")[0] == 2
    assert run(capsys, "generate", "--help")[0] == 0


def test_without_xdg_variables_settings_and_caches_are_in_the_home_folder(
    tmp_path, monkeypatch
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    ours = tmp_path / ".config" / "triforce-offload" / "settings.toml"
    assert settings_path(os.environ) == ours
    assert cache_directory() == tmp_path / ".cache" / "triforce-offload"


def test_keys_at_the_top_apply_to_run_too(speaking, capsys, file) -> None:
    def answer(*options: object) -> str:
        code, out, err = run(capsys, "run", speaking, "Hello", *options)
        assert code == 0, err
        return out

    file.write_text("temperature = 0\nmax-new-tokens = 1\n")
    assert answer() == answer("-n", 1) != answer("-n", 20)


def test_choices_that_are_numbers_can_be_set(capsys, file, monkeypatch) -> None:
    plan = ("plan", "llama3.1-8b", "--gpu", "rtx4090", "--context", 4096, "--json")
    file.write_text("[plan]\ngpus = 2")
    assert json.loads(run(capsys, *plan)[1])["hardware"]["gpus"] == 2
    file.write_text("[plan]\ngpus = 2.5")
    code, _, err = run(capsys, *plan)
    assert (code, "settings.toml, [plan]: gpus cannot be 2.5" in err) == (2, True)
    file.write_text("")
    monkeypatch.setenv("TRIFORCE_GPUS", "2")
    assert json.loads(run(capsys, *plan)[1])["hardware"]["gpus"] == 2
