"""Run a job in a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from rivals.job import Job, Outcome
from rivals.worker import MARK

SCRIPTS = Path(__file__).parent.parent
OWN_PYTHON = SCRIPTS.parent / ".venv-rivals" / "bin" / "python"


def run(job: Job, log: Path, limit_seconds: float, *, own_packages: bool) -> Outcome:
    """Run a job and wait for it. Write its output to `log`.

    If the job fails, the outcome gives the reason.
    """
    python = OWN_PYTHON if own_packages else Path(sys.executable)
    if not python.exists():
        return Outcome(refusal="not installed: bash scripts/setup_rivals.sh")
    environment = {
        **os.environ,
        # The tools that it builds with, such as ninja, are beside its python.
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": str(job.threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        [str(python), "-m", "rivals.worker"],
        cwd=SCRIPTS,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(job.to_json(), timeout=limit_seconds)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        log.write_text(said)
        if isinstance(error, subprocess.TimeoutExpired):
            return Outcome(refusal=f"not done after {limit_seconds:.0f} s")
        raise
    log.write_text(said)
    for line in reversed(said.splitlines()):
        if line.startswith(MARK):
            return Outcome.from_dict(json.loads(line.removeprefix(MARK)))
    return Outcome(refusal=_last_words(said, process.returncode, log))


def _last_words(said: str, code: int, log: Path) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if code < 0:
        return f"ended by {signal.Signals(-code).name} (its output: {log})"
    return f"failed: {lines[-1] if lines else 'no output'} (its output: {log})"
