"""K1 at every part of a run: load, reading, decoding, saving. Text and stats are kept, and nothing
is left behind: no part of a file, no process, no shared memory, no terminal without its cursor.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import interrupted_runs
import pytest
from command import heed_signals

from triforce_offload.files import Output

# What the signal comes at, and how far the run is then: its tokens, and whether its text has ended.
MOMENTS = {
    "loading": ({"kind": "budget", "at": 2}, None, None),
    "reading": ({"kind": "copy asked", "at": 3}, 0, "interrupted"),
    "decoding": ({"kind": "copy asked", "at": 30}, 2, "interrupted"),
    "saving": ({"kind": "write", "at": 12}, 40, "length"),
    "whenever that is": ({"seconds": 0.0}, ..., ...),
    "a little later": ({"seconds": 0.1}, ..., ...),
}


@pytest.mark.slow
def test_an_interrupt_at_any_part_of_a_run_leaves_what_is_whole(speaking, tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, interrupted_runs.__file__, str(speaking), str(tmp_path)],
        input=json.dumps([moment for moment, *_ in MOMENTS.values()]),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(interrupted_runs.__file__).parent)},
        check=True,
    )
    found = dict(zip(MOMENTS, map(json.loads, done.stdout.splitlines()), strict=True))
    for name, (moment, tokens, ended) in MOMENTS.items():
        one = found[name]
        assert one["wrong"] == [], name
        # By the clock it may have ended before.
        assert one["code"] == 130 or "seconds" in moment, name
        if tokens is not ...:
            assert (one["tokens"], one["ended"]) == (tokens, ended), name
    folders = [tmp_path / str(number) for number in range(len(MOMENTS))]
    assert not (folders[0] / "stats").exists()
    # What was computed for a text that was interrupted is saved.
    assert (folders[2] / "context").exists()
    assert not (folders[3] / "context").exists()


@pytest.mark.slow
def test_a_run_after_one_that_was_killed_is_right_and_leaves_nothing_of_it(
    speaking, tmp_path
) -> None:
    moments = [{"killed": seconds} for seconds in (0.02, 0.15, 0.3, 0.45, 0.6)]
    done = subprocess.run(
        [sys.executable, interrupted_runs.__file__, str(speaking), str(tmp_path)],
        input=json.dumps(moments),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(interrupted_runs.__file__).parent)},
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["wrong"] for one in found] == [[]] * len(moments)
    assert len({one["text"] for one in found}) == 1
    assert found[0]["codes"][0] == -9


def test_parts_of_files_that_dead_processes_left_are_deleted(tmp_path) -> None:
    part, living = (f".file.{platform.node()[:40]}.{n}.x.partial" for n in (2**22 + 5, 1))
    for name in (part, living, ".file.elsewhere.7.x.partial", ".other.1.x.partial"):
        (tmp_path / name).write_text("")
    Output(tmp_path / "file", "file").write("all of it")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"file", living, ".file.elsewhere.7.x.partial", ".other.1.x.partial"}


def test_who_leaves_at_once_leaves_no_part_of_a_file(tmp_path) -> None:
    """A second interrupt, which waits for nothing."""
    program = """if True:
        import os, signal
        from triforce_core.cli.terminal.ending import leave_at_once
        from triforce_offload.files import Output
        leave_at_once()
        with Output("file", "file").writing() as file:
            print(len(os.listdir()))
            os.kill(os.getpid(), signal.SIGINT)
        """
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=heed_signals,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "1\n", "")
    assert list(tmp_path.iterdir()) == []
