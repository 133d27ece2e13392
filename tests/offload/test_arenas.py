"""How many arenas the threads of a process have."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys, threading
from triforce_offload.memory.arenas import share_arenas
if "shared" in sys.argv:
    share_arenas()
at_once = threading.Barrier(8)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def allocate():
    at_once.wait()
    libc.malloc(100)
    at_once.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fdopen.restype = ctypes.c_void_p
out = libc.fdopen(1, b"w")
libc.malloc_info(0, ctypes.c_void_p(out))
libc.fflush(ctypes.c_void_p(out))
"""


def arenas(*arguments: str, **environment: str) -> int:
    own = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, env=own | environment, capture_output=True, check=True)
    return done.stdout.count(b"<heap nr=")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_threads_share_two_arenas_unless_the_user_says_otherwise() -> None:
    assert arenas("shared") <= 2 < arenas()
    assert arenas("shared", MALLOC_ARENA_MAX="1") == 1
