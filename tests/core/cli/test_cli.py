"""The command line: stdout is text only, exit codes, one clear sentence for every mistake."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from command import GREEDY, least_memory, run
from helpers import add_tokenizer, make_model

from triforce_core.cli.terminal.report import takes_colors
from triforce_core.settings import METHODS


def test_stdout_is_the_text_and_stats_are_whole(speaking, capsys, tmp_path) -> None:
    stats_file = tmp_path / "stats.json"
    code, out, err = run(
        capsys, "generate", speaking, "--prompt", "Hello", *GREEDY, "--stats", stats_file
    )
    stats = json.loads(stats_file.read_text())
    assert code == 0
    assert out == stats["text"] + ("" if stats["text"].endswith("\n") else "\n")
    assert stats["new_tokens"] == 20
    assert "tokens/s" in err
    assert not list(tmp_path.glob("*.partial"))


def test_quiet_says_nothing_but_the_text(speaking, capsys) -> None:
    code, out, err = run(capsys, "generate", speaking, "--prompt", "Hello", *GREEDY, "--quiet")
    assert (code, err) == (0, "")
    assert out


@pytest.mark.slow
def test_colours_say_where_tokens_come_from_and_change_nothing_else(
    speaking, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    lengths = ("--draft-tokens", "4", "--inner-draft-tokens", "2", "--budget", "32")
    drafts = ("--draft", speaking, *lengths, "--seed", "2", "--temperature", "0.9")
    base = ("generate", speaking, "--prompt", "Hello", "--device", "cpu", *drafts)
    plain, colored = run(capsys, *base), run(capsys, *base, "--color-levels")
    assert colored[0] == 0
    assert re.sub(r"\x1b\[\d+m", "", colored[1]) == plain[1]
    # Accepted, corrected, bonus.
    assert {"32", "33", "36", "0"} == set(re.findall(r"\x1b\[(\d+)m", colored[1]))
    assert "accepted from a draft" in colored[2]
    assert "model > retrieval > target" in plain[2]
    assert "target accepts" in plain[2]


def test_methods_give_the_same_greedy_text(speaking, capsys) -> None:
    texts = {
        run(capsys, "generate", speaking, "--prompt", "Hello", *GREEDY, "--method", method)[1]
        for method in METHODS
    }
    assert len(texts) == 1


def test_all_sources_of_a_prompt_agree(speaking, capsys, tmp_path, monkeypatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Hello")
    outs = {run(capsys, "generate", speaking, "--prompt", "Hello", *GREEDY)[1]}
    outs.add(run(capsys, "generate", "-m", speaking, "-p", "Hello", *GREEDY)[1])
    outs.add(run(capsys, "generate", speaking, "--prompt-file", file, *GREEDY)[1])
    # A byte order mark and the last newline of a pipe are no part of the text.
    for text, extra in (("Hello\n", ()), ("\ufeffHello", ()), ("Hello", ("--prompt-file", "-"))):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        outs.add(run(capsys, "generate", speaking, *extra, *GREEDY)[1])
    assert len(outs) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\n"))
    assert run(capsys, "generate", speaking, *GREEDY)[1] not in outs


def test_chat_uses_the_template(speaking, capsys) -> None:
    chat = run(capsys, "generate", speaking, "--prompt", "Hi", "--chat", *GREEDY)[1]
    spelt = run(capsys, "generate", speaking, "--prompt", "<u>Hi<a>", *GREEDY)[1]
    plain = run(capsys, "generate", speaking, "--prompt", "Hi", *GREEDY)[1]
    assert chat == spelt != plain


def test_a_model_that_streams_gives_the_same_text(speaking, capsys, tmp_path) -> None:
    prompt = "Hello there, this is a text of some length. " * 8
    base = ("generate", speaking, "--prompt", prompt, *GREEDY)
    resident = run(capsys, *base)
    stats = tmp_path / "stats.json"
    small = (*least_memory(*base), "--link-bandwidth", "5GB/s", "--stats", stats)
    streamed = run(capsys, *base, *small)
    assert resident[0] == streamed[0] == 0
    assert resident[1] == streamed[1]
    assert "0 streamed" in resident[2]
    link = json.loads(stats.read_text())["link"]
    assert link["bytes_to_device"] > 0
    assert link["bandwidth_gb_per_s"] == 5.0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--log-json",), 2, "required"),
        (("generate",), 2, "MODEL"),
        (("generate", "{model}", "--prompt", "x", "--frobnicate"), 2, "--frobnicate"),
        (("generate", "{model}", "--prompt", "x", "--prompt-file", "y"), 2, "not allowed with"),
        (("generate", "/nowhere/at/all", "--prompt", "x"), 2, "/nowhere/at/all"),
        (("generate", "{model}", "--prompt", ""), 2, "empty"),
        (("generate", "{model}", "--prompt-file", "/nowhere"), 2, "/nowhere"),
        (("generate", "{model}", "--prompt", "x", "--temperature", "-1"), 2, "temperature"),
        (("generate", "{model}", "--prompt", "x", "--top-p", "0"), 2, "--top-p"),
        (("generate", "{model}", "--prompt", "x", "--max-new-tokens", "0"), 2, "--max-new-tokens"),
        (("generate", "{model}", "--prompt", "x", "--device", "cuda:77"), 2, "cuda:77"),
        (("generate", "{model}", "--prompt", "x", "--device-memory", "1XB"), 2, "1XB"),
        (("generate", "{model}", "--prompt", "x" * 600), 2, "600 prompt tokens and 256 new ones"),
        (("generate", "{model}", "--prompt", "x", "--device-memory", "90KiB"), 3, "16 tokens need"),
        (("generate", "{model}", "--prompt", "x", "--draft-tokens", "0"), 2, "1 to 256, got 0"),
        (("generate", "{model}", "--prompt", "x", "--draft-tokens", "few"), 2, "'few' is neither"),
        (("generate", "{model}", "--prompt", "x", "--chunk-size", "0"), 2, "power of two, got 0"),
        (("generate", "{model}", "--prompt", "x", "--budget", "9"), 2, "multiple of the chunk"),
        (("generate", "{model}", "--prompt", "x", "--budget", "8000000000"), 3, "8000000000 tok"),
        (("generate", "{model}", "--prompt", "x", "--draft", "{other}"), 2, "vocabulary of 96"),
        (("generate", "{model}", "--prompt", "x", "--draft", "/nowhere/at/all"), 2, "/nowhere"),
        (("generate", "{model}", "--prompt", "x", "--method", "magic"), 2, "magic"),
        (("generate", "{broken}", "--prompt", "x"), 4, "model.safetensors"),
        (("generate", "{mixture}", "--prompt", "x"), 4, "DeepseekV32ForCausalLM"),
        (("generate", "{mute}", "--prompt", "x"), 2, "no tokenizer"),
        (("generate", "{model}", "--prompt", "x", "--stats", "/nowhere/f", *GREEDY), 2, "/nowhere"),
    ],
)
def test_mistakes_get_one_sentence_and_their_exit_code(
    speaking, tiny, tmp_path, capsys, arguments, code, said
) -> None:
    places = {"model": speaking, "mute": tiny("llama")[0]}
    places["other"] = tmp_path / "other"
    make_model("llama", places["other"], vocab_size=96)
    capsys.readouterr()  # what saving it printed
    for name in ("broken", "mixture"):
        places[name] = Path(shutil.copytree(speaking, tmp_path / name))
    (places["broken"] / "model.safetensors").write_bytes(b"\x08" + bytes(30))
    config = json.loads((places["mixture"] / "config.json").read_text())
    config["architectures"] = ["DeepseekV32ForCausalLM"]
    (places["mixture"] / "config.json").write_text(json.dumps(config))
    got, _, err = run(capsys, *(argument.format(**places) for argument in arguments))
    assert got == code
    assert said in err
    assert "Traceback" not in err
    if "usage:" not in err:
        assert len(err.strip().splitlines()) <= 2


def test_debug_shows_the_traceback(speaking, capsys) -> None:
    arguments = ("generate", speaking, "--prompt", "x", "--device-memory", "9KiB")
    code, _, said = run(capsys, *arguments)
    again, _, err = run(capsys, *arguments, "--debug")
    assert again == code == 3
    assert err.startswith("Traceback")
    assert err.endswith(said)


def test_a_trace_is_written_beside_the_text(speaking, capsys, tmp_path) -> None:
    base = ("generate", speaking, "--prompt", "Hello", *GREEDY, "--quiet")
    plain = run(capsys, *base)
    assert run(capsys, *base, "--no-pin", "--no-graphs", "--trace", tmp_path / "t.json") == plain
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"layer", "verify"} <= {event["name"] for event in events}
    code, out, err = run(capsys, *base, "--trace", tmp_path / "missing" / "t.json")
    assert (code, out) == (2, "")
    assert "missing" in err


@pytest.mark.parametrize("stats", [".", "/", "{model}/config.json/x"])
def test_stats_that_cannot_be_written(speaking, capsys, stats: str) -> None:
    where = stats.format(model=speaking)
    code, out, err = run(
        capsys, *("generate", speaking, "--prompt", "x", "--stats", where), *GREEDY
    )
    (said,) = err.strip().splitlines()
    assert (code, out) == (2, "")
    assert "cannot write the stats" in said


def test_a_prompt_that_is_no_text_is_refused(speaking, tmp_path) -> None:
    file = tmp_path / "latin"
    file.write_bytes(b"caf\xe9")
    for source in (("--prompt-file", file), ("--prompt", b"caf\xe9"), ()):
        command = [sys.executable, "-P", "-m", "triforce_core.cli", "generate", speaking, *source]
        with open(file) as stdin:
            result = subprocess.run(command, stdin=stdin, capture_output=True, text=True)
        assert result.returncode == 2
        assert len(result.stderr.strip().splitlines()) == 1


def test_no_chat_template(tmp_path, capsys) -> None:
    make_model("llama", tmp_path)
    add_tokenizer(tmp_path, chat=False)
    code, _, err = run(capsys, "generate", tmp_path, "--prompt", "x", "--chat")
    assert code == 2
    assert "chat template" in err


def test_env_names_what_was_found(capsys) -> None:
    code, out, _ = run(capsys, "env")
    assert code == 0
    for name in ("GPU", "driver", "host memory", "pinning limit", "torch", "transformers"):
        assert name in out


def test_help_and_version(capsys) -> None:
    assert run(capsys, "--help")[0] == 0
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0
    for option in ("--prompt-file", "--chat", "--device-memory", "--help-all", "--stats"):
        assert option in out
    for group in ("input:", "sampling:", "drafting:", "memory and placement:", "output:"):
        assert f"\n{group}\n" in out
    code, everything, _ = run(capsys, "generate", "--help-all")
    assert code == 0
    flags, all_flags = (set(re.findall(r"--[a-z-]+", text)) for text in (out, everything))
    assert flags < all_flags
    assert "--link-bandwidth" in all_flags - flags, "for experts"
    assert "triforce" in run(capsys, "--version")[1]


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, triforce_core.cli.main as c; c._parser(); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("genrate", "x"), "did you mean generate?"),
        (("generate", "x", "--temprature", "3"), "did you mean --temperature?"),
        (("plan", "llama2-7b", "--method", "trifoce"), "did you mean triforce?"),
        (("generate", ""), "the model's name is empty"),
        (("generate", "a", "-m", "b"), "not allowed with argument"),
        (("plan", "llama2-7b", "", ""), "unrecognized arguments"),
        (("generate", "x", "--save", "y"), "--save (did you mean --save-context?)"),
        (("generate", "x", "--no-such"), "unrecognized arguments: --no-such; see"),
        (("generate", "x", "-c", "128M"), "--context: '128M' is not a whole number; see"),
        (("generate", "x", "-n", "few"), "--n-predict: 'few' is not a whole number; see"),
        (("generate", "x", "--top-p", "high"), "--top-p: 'high' is not a number; see"),
        (("generate", "x", "--json-schema", "no"), "read --json-schema no: No such file or dir"),
        (("generate", "x", "-ngl", "99"), "-ngl: there is no number of layers to choose"),
        (("plan", "x", "--gpu-layers", "99"), "--device-memory limits them"),
    ],
)
def test_a_typo_gets_one_line_with_what_may_have_been_meant(capsys, arguments, said) -> None:
    code, out, err = run(capsys, *arguments, *(("--prompt", "x") if arguments[1] == "" else ()))
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_a_terminal_shows_what_is_waited_for(speaking) -> None:
    terminal, theirs = os.openpty()
    command = [sys.executable, "-P", "-m", "triforce_core.cli", "generate", speaking, "-p", "Hello"]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(
        [*command, *GREEDY], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        # Linux ends a terminal that all others have closed with an error.
        with suppress(OSError):
            while more := os.read(terminal, 1 << 16):
                shown += more
        text = process.stdout.read()
    os.close(terminal)
    assert process.returncode == 0
    assert text.strip()
    order = [shown.find(said) for said in (b"opening the model", b"3/3 layers", b"tokens/s")]
    assert -1 not in order
    assert order == sorted(order)


def test_a_reader_that_leaves_is_told_from_a_failure() -> None:
    """Of tables too, which rich prints."""
    command = [sys.executable, "-P", "-m", "triforce_core", "plan", "llama2-7b", "--gpu", "rtx4090"]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_prompts_last_newline_is_no_part_of_it(speaking, capsys, tmp_path) -> None:
    (tmp_path / "line").write_text("Hello\n")
    (tmp_path / "bytes").write_bytes(b"\xf6\xf6")
    expected = run(capsys, "generate", speaking, "-p", "Hello", *GREEDY)[1]
    assert (
        run(capsys, "generate", speaking, "--prompt-file", tmp_path / "line", *GREEDY)[1]
        == expected
    )
    code, _, err = run(capsys, "generate", speaking, "--prompt-file", tmp_path / "bytes", *GREEDY)
    assert code == 2
    assert "is not UTF-8 text (byte 0)" in err


def test_options_without_effect_are_named(speaking, capsys) -> None:
    base = ("generate", speaking, "--prompt", "Hello", *GREEDY, "--method", "autoregressive")
    _, _, err = run(capsys, *base, "--draft", "ngram", "--budget", "64")
    assert "no effect with --method autoregressive: --draft, --budget" in err
    assert "no effect" not in run(capsys, *base)[2]


def test_the_plan_says_what_runs_and_not_what_was_asked(speaking, capsys) -> None:
    base = ("generate", speaking, "--prompt", "Hello" * 40, *GREEDY, "--draft-weights", "exact")
    resident = "nothing streams, and it would read the same weights as a pass"
    for memory, why in ((least_memory(*base)[1], "weights stream"), ("1GiB", resident)):
        _, _, err = run(capsys, *base, "--device-memory", memory)
        (line,) = [line for line in err.splitlines() if line.startswith("plan: ")]
        assert line.startswith("plan: speculative, ")
        assert line.endswith(f"no retrieval level, since {why}")


def test_a_context_that_is_asked_for_must_hold_the_text(speaking, capsys) -> None:
    base = ("generate", speaking, "-p", "Hello", *GREEDY[:2], "--device", "cpu", "-n", "20")
    code, _, err = run(capsys, *base, "-c", "24")
    assert code == 2
    assert "5 prompt tokens and 20 new ones are more than the 24 positions --ctx-size gives" in err
    code, _, err = run(capsys, *base, "-c", "300")
    assert code == 0


@pytest.mark.parametrize(
    ("environment", "terminal", "colors"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
    ],
)
def test_colours_go_to_terminals_that_show_them(monkeypatch, environment, terminal, colors) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    assert takes_colors(stream) is colors


def test_the_package_runs_as_a_module_too() -> None:
    command = [sys.executable, "-P", "-m", "triforce_core", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("triforce ")
