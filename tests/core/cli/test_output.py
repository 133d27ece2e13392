"""K1 and what else ends a run early, signals, full disks, readers that leave: nothing is lost."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from command import GREEDY, heed_signals, least_memory, run, wait_until_heeded

from triforce_core.cli.terminal.output import TextOutput
from triforce_core.cli.terminal.signals import Stop
from triforce_offload.link.emulated import EmulatedLink


def start(*arguments: object, **options: object) -> subprocess.Popen:
    """A command that heeds signals, even if these tests were started to ignore some, as a shell
    starts what runs in the background.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "triforce_core.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        **{"preexec_fn": heed_signals, **options},
    )


def streaming(rate: str, *arguments: object) -> subprocess.Popen:
    """A command that streams the weights of every layer in each pass."""
    arguments = (*arguments, "--device", "cpu")
    return start(*arguments, *least_memory(*arguments), "--link-bandwidth", rate)


@pytest.mark.first
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_text_and_stats(speaking, tmp_path, number: signal.Signals) -> None:
    """K1, over a link so slow that a pass takes a third of a second."""
    prompt = "Hello there, this is a text of some length. " * 8
    stats = tmp_path / "stats.json"
    process = streaming(
        *("2MB/s", "generate", speaking, "--prompt", prompt, "--max-new-tokens", "60"),
        *("--temperature", "0", "--stats", stats),
    )
    first = process.stdout.read(1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    written = json.loads(stats.read_text())
    assert written["finish_reason"] == "interrupted"
    assert (first + out).rstrip("\n") == written["text"].rstrip("\n")
    assert 0 < written["new_tokens"] < 60
    assert "interrupted" in err
    assert "Traceback" not in err


def test_a_link_that_fails_keeps_text_and_stats(capsys, monkeypatch, speaking, tmp_path) -> None:
    """F2, F3: what was said until then, the figures of it, one sentence and its exit code."""
    prompt, stats = "Hello there, this is a text of some length. " * 8, tmp_path / "stats.json"
    options = ("--prompt", prompt, "--max-new-tokens", 60, *GREEDY, "--device", "cpu")
    options += (*least_memory("generate", speaking, *options), "--stats", stats)
    original, copies, failing = EmulatedLink.to_device, 0, 0

    def to_device(link: EmulatedLink, *copy: object) -> object:
        nonlocal copies
        copies += 1
        event = original(link, *copy)
        if copies == failing:
            link.wait(event)
            event.error = OSError("planted")
        return event

    monkeypatch.setattr(EmulatedLink, "to_device", to_device)
    assert run(capsys, "generate", speaking, *options)[0] == 0
    whole = json.loads(stats.read_text())
    failing, copies = 2 * copies // 3, 0
    code, out, err = run(capsys, "generate", speaking, *options)
    assert code == 1
    assert "planted" in err
    kept = json.loads(stats.read_text())
    assert kept["finish_reason"] == "error"
    assert "planted" in kept["error"]
    assert 0 < kept["new_tokens"] < 60
    assert out.rstrip("\n") == kept["text"].rstrip("\n")
    assert whole["text"].startswith(kept["text"])


@pytest.mark.slow
def test_a_second_interrupt_exits_at_once(speaking) -> None:
    prompt = "Hello there, this is a text of some length. " * 8
    process = streaming(
        *("60KB/s", "generate", speaking, "--prompt", prompt, "--max-new-tokens", "60")
    )
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    # A person is told a second after the first one came. The pass under way takes ten.
    while "ending after this pass" not in (line := process.stderr.readline()):
        assert line, "it ended at the first"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == 130


@pytest.mark.first
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.4])
def test_an_interrupt_while_starting_leaves_at_once(speaking, seconds: float) -> None:
    """In the middle of imports, of loading, or already of the text, which goes on for a minute:
    every pass streams the weights.
    """
    process = streaming(
        *("2MB/s", "generate", speaking, "--prompt", "Hello", "--max-new-tokens", "400")
    )
    wait_until_heeded(process.pid)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_reader_that_leaves_ends_the_run_and_the_stats_are_kept(speaking, tmp_path) -> None:
    stats = tmp_path / "stats.json"
    process = start(
        *("generate", speaking, "--prompt", "Hello", "--max-new-tokens", "400", "--quiet"),
        *("--device", "cpu", "--stats", stats),
    )
    process.stdout.read(1)
    process.stdout.close()
    (said,) = process.stderr.read().strip().splitlines()
    assert process.wait(timeout=60) == 141
    assert "the reader of the text has gone" in said
    assert json.loads(stats.read_text())["finish_reason"] == "interrupted"


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_the_stats_are_kept(speaking, tmp_path) -> None:
    stats = tmp_path / "stats.json"
    command = [sys.executable, "-P", "-m", "triforce_core.cli", "generate", speaking]
    command += ["--prompt", "Hello", "--max-new-tokens", "400", "--quiet", "--stats", stats]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    (said,) = done.stderr.strip().splitlines()
    assert done.returncode == 5
    assert "No space left" in said
    assert str(stats) in said
    written = json.loads(stats.read_text())
    assert 0 < written["new_tokens"] < 400


@pytest.mark.slow
def test_a_closed_standard_output_wants_a_file_for_the_text(speaking, tmp_path) -> None:
    stats = tmp_path / "stats.json"
    command = f"{sys.executable} -P -m triforce_core.cli generate {speaking} --prompt Hello --quiet"
    command += f" {' '.join(GREEDY)}"
    done = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True)
    assert done.returncode == 2
    assert "standard output is closed" in done.stderr
    done = subprocess.run(f"{command} --stats {stats} >&-", shell=True, capture_output=True)
    assert done.returncode == 0
    assert json.loads(stats.read_text())["new_tokens"] == 20


def test_characters_that_standard_output_lacks_are_escaped(monkeypatch) -> None:
    there = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(there, "ascii"))
    output = TextOutput()
    assert output.write("plain ")
    assert not output.escaped
    assert output.write("caf\xe9")
    assert output.escaped
    assert there.getvalue() == b"plain caf\\xe9"


def test_outputs_are_checked_before_anything_is_loaded(speaking, capsys, tmp_path) -> None:
    file = tmp_path / "file"
    base = ("generate", speaking, "--prompt", "Hello", *GREEDY, "--quiet")
    code, out, err = run(capsys, *base, "--stats", file, "--trace", file)
    assert (code, out) == (2, "")
    assert "was given for the trace and for the stats" in err
    file.write_text("Hello")
    code, out, err = run(
        capsys, "generate", speaking, "--prompt-file", file, *GREEDY, "--stats", file
    )
    assert (code, out, file.read_text()) == (2, "", "Hello")
    code, out, _ = run(capsys, *base, "--stats", "-")
    assert code == 0
    text, stats = out.split("\n{\n", 1)
    assert json.loads("{" + stats)["text"].rstrip("\n") == text.rstrip("\n")


@pytest.mark.slow
def test_stats_outlive_standard_error_too(speaking, tmp_path) -> None:
    stats = tmp_path / "stats.json"
    command = [sys.executable, "-P", "-m", "triforce_core.cli", "generate", speaking]
    command += ["--prompt", "Hello", "--max-new-tokens", "40", "--stats", stats]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=full, check=False)
    assert done.returncode == 5
    assert json.loads(stats.read_text())["new_tokens"] > 0


def test_what_a_table_cannot_be_printed_to_is_said(tmp_path) -> None:
    command = [sys.executable, "-P", "-m", "triforce_core.cli", "plan", "llama2-7b"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "--gpu", "h100", "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 5
    assert done.stderr.startswith("triforce: cannot write to standard output: No space left")
    assert len(done.stderr.splitlines()) == 1


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """As `nohup` leaves it."""
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "from triforce_core.cli.terminal.ending import leave_at_once; leave_at_once(); "
        "from triforce_core.cli.terminal.signals import Stop; "
        "stop = Stop(print).listening(); stop.__enter__(); "
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "
        "signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_person_is_told_that_a_pass_ends_first_and_not_after_it_has(monkeypatch) -> None:
    said = threading.Event()
    for ends, patience in ((True, 60.0), (False, 0.05)):
        monkeypatch.setattr("triforce_core.cli.terminal.signals._PATIENCE", patience)
        stop = Stop(lambda: None, said.set)
        stop.end = lambda: None
        stop(signal.SIGINT, None)
        if ends:
            stop.ended()
            # It waits no longer, and has said nothing.
            stop._timer.join(30)
            assert not stop._timer.is_alive()
            assert not said.is_set()
    assert said.wait(30)
