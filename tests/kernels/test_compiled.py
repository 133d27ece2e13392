"""Every kernel compiles for the GPUs it is meant for, within what they have. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from triforce_kernels.dispatch import KERNELS

pytest.importorskip("triton.backends.nvidia")

# An RTX 4090; TRIFORCE_CAPABILITIES="80 89 90" compiles for an A100 and an H100 too.
CAPABILITIES = os.environ.get("TRIFORCE_CAPABILITIES", "89").split()
# Shared memory of a program on compute capabilities 8.6 and 8.9: RTX 3090, RTX 4090.
SHARED_BYTES = 99 << 10
SPILT_BYTES = 32
READS_HOST_MEMORY = ("_gather_kernel", "_gather_split_kernel")
ROUNDS_TO_8_BITS = ("_round_kernel", "_rope_kernel")
# Kernels are looked up there by what they are compiled from: a second run compiles what changed.
CACHE = Path(__file__).parents[2] / ".triton_cache"


@pytest.mark.slow
@pytest.mark.timeout(3600)  # Minutes of compiling, and more beside other work.
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_and_fit(capability: str) -> None:
    """What lies in registers stays there but for a few bytes, and shared memory suffices."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(CACHE)
    program = Path(__file__).with_name("compiling.py")
    done = subprocess.run(
        [sys.executable, program, capability, "all" if capability == "89" else "few"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    of_triton = {name for name, paths in KERNELS.items() if paths.triton != paths.reference}
    assert of_triton - set(said["launched"]) <= {"attention_splits"}
    for name, kernel, shared, spilt, _, widest, byte_reads, approximate in said["rows"]:
        assert shared <= SHARED_BYTES, (name, kernel)
        assert spilt <= (400 if "glm" in name else SPILT_BYTES), (name, kernel)
        # Out of host memory, where every read counts.
        assert widest == 16 or kernel not in READS_HOST_MEMORY, (name, kernel)
        assert not byte_reads or kernel not in READS_HOST_MEMORY, (name, kernel)
        # Whole numbers of 8 bits are the same on a GPU and on a processor.
        assert not approximate or kernel not in ROUNDS_TO_8_BITS, (name, kernel)
