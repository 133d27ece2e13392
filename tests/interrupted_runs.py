"""Runs of `triforce generate` that a signal ends: what must hold then.

Torch is loaded once, in a process of its own that forks one for each run:
`python tests/interrupted_runs.py MODEL FOLDER < MOMENTS`, and a line of JSON comes for each. A
moment is {"seconds": ...} or {"kind": ..., "at": ...}, see `run`, or {"killed": seconds}, see
`killed`.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PROMPT = "Hello there, this is a text of some length. " * 8
_SHOWN, _HIDDEN = b"\x1b[?25h", b"\x1b[?25l"
_END_SECONDS = 60.0


def killed(model: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """A run that is killed so long after it began, and then the same one again, which must give its
    text, stats and context, and leave nothing of the first.
    """
    folder.mkdir()
    os.environ["XDG_CACHE_HOME"] = str(folder)
    codes, began = [], time.perf_counter()
    for signalled in (True, False):
        process = os.fork()
        if not process:
            nowhere = os.open(os.devnull, os.O_RDWR)
            # 4-bit copies of layers are kept on disk.
            argv = [*arguments(model, folder), "--draft-weights", "int4"]
            _be_interrupted(nowhere, argv, folder, {})
        if signalled:
            time.sleep(seconds)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        codes.append(_wait(process))
    took, wrong = time.perf_counter() - began, []
    about = kept(folder, codes[1], wrong)
    if codes[1]:
        wrong.append(f"the run after it ended with {codes[1]}")
    if left := [path.name for path in folder.rglob("*.partial")]:
        wrong.append(f"parts of files: {left}")
    return {"seconds": seconds, "codes": codes, "text": about["text"], "took": took, "wrong": wrong}


def arguments(model: object, folder: Path) -> list[str]:
    """Of a run that streams, traces and saves: about a second, most of it passes."""
    from command import least_memory

    given = ("generate", model, "--prompt", PROMPT, "--max-new-tokens", 40, "--temperature", 0)
    where = (*least_memory(*given, "--device", "cpu"), "--device", "cpu")
    files = ("--stats", folder / "stats", "--trace", folder / "trace")
    files += ("--save-context", folder / "context")
    return [str(it) for it in (*given, *where, "--link-bandwidth", "60MB/s", *files)]


def run(model: Path, folder: Path, moment: dict[str, Any]) -> dict[str, Any]:
    """Runs in a fork, interrupted at a moment: "seconds" after it began, or, by itself, at place
    number "at" of a "kind" (see fault_points). Returns its exit code, how long it took to end, and
    what is wrong.
    """
    folder.mkdir()
    shared = set(os.listdir("/dev/shm"))
    leader, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    # Until the fork heeds it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process = os.fork()
    if not process:
        _be_interrupted(terminal, arguments(model, folder), folder, moment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    shown = bytearray()
    reader = threading.Thread(target=_read, args=(leader, shown))
    reader.start()
    began = time.perf_counter()
    if "seconds" in moment:
        time.sleep(moment["seconds"])
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGINT)
        began = time.perf_counter()
    code = _wait(process)
    seconds = time.perf_counter() - began
    after = termios.tcgetattr(terminal)
    os.close(terminal)
    reader.join()
    os.close(leader)
    wrong = [] if after == before else ["the terminal is not as it was"]
    if shown.rfind(_HIDDEN) > shown.rfind(_SHOWN):
        wrong.append("the cursor is hidden")
    if b"Traceback" in shown:
        wrong.append(shown.decode(errors="replace"))
    with suppress(ProcessLookupError):
        os.killpg(process, 0)
        wrong.append("a process is left")
    own = {it for it in os.listdir("/dev/shm") if str(process) in it}
    if own - shared:
        wrong.append(f"left in /dev/shm: {own - shared}")
    return {**moment, "code": code, "seconds_to_end": seconds, **kept(folder, code, wrong)}


def kept(folder: Path, code: int, wrong: list[str]) -> dict[str, Any]:
    """What a run that ended with this code has left in its folder, and what is wrong with it."""
    from safetensors import safe_open

    if code not in (0, 130):
        wrong.append(f"it ended with {code}")
    parts = [path.name for path in folder.iterdir() if path.name.endswith(".partial")]
    if parts:
        wrong.append(f"parts of files: {parts}")
    text = (folder / "text").read_text()
    stats = None
    for name in ("stats", "trace"):
        if (folder / name).exists():
            whole = json.loads((folder / name).read_text())
            stats = whole if name == "stats" else stats
    if (folder / "context").exists():
        with safe_open(folder / "context", "np") as file:
            assert "tokens" in file.keys()  # noqa: SIM118
    elif not code:
        wrong.append("no context was saved")
    if text and stats is None:
        wrong.append("there is text, and there are no stats")
    if stats is not None and text.rstrip("\n") != stats["text"].rstrip("\n"):
        wrong.append(f"the text is {text!r}, and the stats have {stats['text']!r}")
    ended = stats and stats["finish_reason"]
    if not code and ended == "interrupted":
        wrong.append("it was interrupted and ended with 0")
    said = {"tokens": stats and stats["new_tokens"], "ended": ended, "text": text}
    return {**said, "wrong": wrong}


def _be_interrupted(terminal: int, argv: list[str], folder: Path, moment: dict[str, Any]) -> None:
    """In the fork: a command of its own session, with its text in a file. Does not return."""
    from fault_points import Faults, Held, planted

    from triforce_core.cli.main import main
    from triforce_core.cli.terminal.ending import leave_at_once

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    text = os.open(folder / "text", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, stream in ((0, terminal), (1, text), (2, terminal)):
        os.dup2(stream, target)
    os.environ["TERM"] = "xterm"
    leave_at_once()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if "kind" in moment:

        class Signals(Faults):
            def fail(self, kind: str) -> None:
                os.kill(os.getpid(), signal.SIGINT)

        signals = Signals()
        signals.arm(moment["kind"], moment["at"])
        with planted(signals, Held()):
            code = main(argv)
    else:
        code = main(argv)
    sys.stdout.flush()
    os._exit(code)


def _wait(process: int) -> int:
    """The exit code; of one that does not end, what it is killed with."""
    until = time.monotonic() + _END_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _read(leader: int, into: bytearray) -> None:
    with suppress(OSError):
        while data := os.read(leader, 4096):
            into += data


def main() -> None:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    # So that forks find loaded what takes long to load.
    import triforce_core.cli.generate.command
    import triforce_core.cli.generate.run  # noqa: F401
    from triforce_core.loading.open_model import OpenModel

    with OpenModel.at(model):
        pass
    for number, moment in enumerate(json.load(sys.stdin)):
        each = folder / str(number)
        if "killed" in moment:
            print(json.dumps(killed(model, each, moment["killed"])), flush=True)
        else:
            print(json.dumps(run(model, each, moment)), flush=True)


if __name__ == "__main__":
    main()
