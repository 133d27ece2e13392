"""Idle OpenMP threads sleep, whoever starts the engine: they take no processor from others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
# Seconds of processor time that 100 short parallel regions with pauses between them take, in a
# process that has loaded torch. How busy the machine is does not change them.
MEASURE = """
import time
def measure():
    import torch
    torch.set_num_threads(2)
    numbers = torch.zeros(1 << 17)
    numbers.add_(1)
    began = time.process_time()
    for _ in range(100):
        numbers.add_(1)
        time.sleep(0.005)
    print(time.process_time() - began)
"""
ENGINE = """
with Engine.from_pretrained({model!r}, device="cpu", threads=2) as engine:
    measure()
"""
COMMAND = """
import triforce_core.cli.main
triforce_core.cli.main.main = lambda *_: measure()
"""
STARTS = {
    "python": "from triforce_core import Engine\nimport torch\n" + ENGINE,
    "python with torch loaded first": "import torch\nfrom triforce_core import Engine\n" + ENGINE,
    "triforce": "from triforce_core.cli import entry\n" + COMMAND + "entry.main()",
    "demo": "import demo, sys\nsys.argv = ['demo.py', '--seed', '1']\n" + COMMAND + "demo.main()",
}


def processor_seconds(code: str, **variables: str) -> float:
    """What `measure` printed in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEASURE + code],
        **{"env": environment | {"PYTHONPATH": str(SCRIPTS)} | variables},
        **{"capture_output": True, "text": True, "check": True},
    )
    return float(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def busy() -> float:
    """Processor seconds of a process whose idle threads busy-wait as they do by default."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one processor OpenMP hardly busy-waits")
    return processor_seconds("measure()")


@pytest.mark.parametrize(
    "start",
    [pytest.param(name, marks=() if name == "triforce" else pytest.mark.slow) for name in STARTS],
)
def test_idle_threads_sleep_whoever_starts_the_engine(speaking, busy, start: str) -> None:
    code = STARTS[start].format(model=str(speaking))
    assert processor_seconds(code) < busy / 4


@pytest.mark.slow
def test_a_users_own_choice_is_kept(speaking, busy) -> None:
    code = STARTS["python with torch loaded first"].format(model=str(speaking))
    assert processor_seconds(code, GOMP_SPINCOUNT="300000") > busy / 4
