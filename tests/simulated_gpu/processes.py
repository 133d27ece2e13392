"""Simulated GPUs for processes that a test or a script starts."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

_HERE = Path(__file__).parent
# A process whose own text went well ends with this code if its streams were in no certain order.
FAULTY = 70
# Holds the simulation until the process ends.
_SIMULATION = ExitStack()


def environment(gpus: int, multiprocessors: int) -> dict[str, str]:
    """Variables with which Python processes find so many simulated GPUs."""
    paths = [str(_HERE / "site"), str(_HERE.parent)]
    if there := os.environ.get("PYTHONPATH"):
        paths.append(there)
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "SIMULATED_GPUS": str(gpus),
        "SIMULATED_MULTIPROCESSORS": str(multiprocessors),
        "TRITON_INTERPRET": "1",
    }


def main() -> None:
    """Print shell commands that set `environment`, for two GPUs of a few multiprocessors."""
    for name, value in environment(2, 2).items():
        print(f"export {name}={shlex.quote(value)}")


def take_part() -> None:
    """Simulates the GPUs that this process's environment counts, until it ends."""
    # A shell asks for the variables alone, without torch.
    from simulated_gpu.install import simulated
    from simulated_gpu.order import Adversary

    machine = _SIMULATION.enter_context(
        simulated(
            Adversary(os.environ.get("SIMULATED_ADVERSARY", "late")),
            gpus=int(os.environ["SIMULATED_GPUS"]),
            multiprocessors=int(os.environ.get("SIMULATED_MULTIPROCESSORS", "128")),
        )
    )

    def end() -> None:
        if machine.faults:
            for fault in machine.faults:
                print(f"simulated GPU: {fault}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(FAULTY)

    atexit.register(end)


if __name__ == "__main__":
    main()
