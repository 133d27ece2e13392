"""Commands whose ranks are processes, and what is left of them."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

ENDS_WITHIN = 10.0


def run(*arguments: object, **options: object) -> subprocess.Popen:
    """A command, in a group of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def followers(process: subprocess.Popen) -> list[psutil.Process]:
    """In the order of their ranks."""
    found = psutil.Process(process.pid).children(recursive=True)
    ranks = [it for it in found if "triforce_core.parallel" in " ".join(it.cmdline())]
    return sorted(ranks, key=lambda it: int(it.environ()["RANK"]))


def kill_followers() -> None:
    """Those of engines in this process."""
    for child in psutil.Process().children(recursive=True):
        if "triforce_core.parallel" in " ".join(child.cmdline()):
            child.kill()
