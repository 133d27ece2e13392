"""The default test suite beside busy processes, and as other processors would run it.

Runs beside two busy processes come first. Then each of PyTorch's libraries is told to use an older
instruction set, in a run each, and the threads are one or four. The result is written after
every run.

    python scripts/checks/suite_everywhere.py [--runs 10] [--only NAME ...] [--resume] [-- ...]

Arguments behind `--` go to pytest: `-- tests/offload -k feed`. Failures are counted by test. Writes
benchmarks/results/suite_everywhere.json. Exits with 1 if a test failed in any run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "checks")]

import results  # noqa: E402
from demo_under_load import busy_processes  # noqa: E402

NAME = "suite_everywhere"
# As scripts/test.sh runs the suite.
SUITE = (
    *(sys.executable, "-P", "-m", "pytest", "-q"),
    *("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"),
)
USUAL = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
# pytest ends with 0 if all tests passed and with 1 if some failed. Otherwise it did not run them.
_ENDED = (0, 1)
_FAILED = {"failure", "error"}


@dataclass(frozen=True)
class Environment:
    """Where the suite runs.

    variables: of the environment, over the usual ones
    busy: processes beside it that keep a processor busy
    """

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    busy: int = 0


BUSY = Environment("busy", busy=2)
ENVIRONMENTS = (
    BUSY,
    Environment("aten-default", {"ATEN_CPU_CAPABILITY": "default"}),
    Environment("aten-avx2", {"ATEN_CPU_CAPABILITY": "avx2"}),
    Environment("onednn-avx2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    Environment("onednn-sse41", {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Environment("mkl-avx2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
    Environment("mkl-sse4_2", {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
    Environment("threads-1", {"OMP_NUM_THREADS": "1"}),
    Environment("threads-4", {"OMP_NUM_THREADS": "4"}),
)
# None of these reaches a run that does not set it.
_VARIED = {name for each in ENVIRONMENTS for name in each.variables}


@dataclass(frozen=True)
class Run:
    """One run of the suite. exit_code: pytest's; failed: names of tests, in their order"""

    environment: str
    variables: Mapping[str, str]
    busy: int
    date: str
    revision: str
    pytest: Sequence[str]
    seconds: float
    exit_code: int
    passed: int
    skipped: int
    failed: Sequence[str]

    @property
    def holds(self) -> bool:
        return self.exit_code == 0 and not self.failed


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    asked = [each for each in ENVIRONMENTS if not args.only or each.name in args.only]
    wanted = [each for each in asked for _ in range(args.runs if each is BUSY else 1)]
    runs = _kept(args.pytest) if args.resume else []
    made = Counter(run.environment for run in runs)
    for number, environment in enumerate(wanted, 1):
        if made[environment.name]:
            made[environment.name] -= 1
            continue
        run = suite(environment, args.pytest)
        runs.append(run)
        path = results.write_result(NAME, figures(runs))
        print(
            f"run {number} of {len(wanted)}, {run.environment}: {run.passed} passed, "
            f"{len(run.failed)} failed, {run.seconds:.0f} s, written to {os.path.relpath(path)}",
            flush=True,
        )
    return 0 if all(run.holds for run in runs) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=10, help="runs beside two busy processes")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[each.name for each in ENVIRONMENTS],
        metavar="NAME",
        help="run in these alone: " + ", ".join(each.name for each in ENVIRONMENTS),
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the runs that the result has, of this revision and these pytest arguments",
    )
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, behind `--`")
    return parser


def suite(environment: Environment, arguments: Sequence[str]) -> Run:
    """Run the suite once. What pytest says of failures goes to standard output."""
    usual = {name: value for name, value in os.environ.items() if name not in _VARIED}
    with tempfile.TemporaryDirectory() as directory, busy_processes(environment.busy):
        report = Path(directory) / "report.xml"
        began = time.perf_counter()
        done = subprocess.run(
            [*SUITE, f"--junit-xml={report}", *arguments],
            cwd=SCRIPTS.parent,
            env=usual | USUAL | environment.variables,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - began
        passed, skipped, failed = counted(report)
    if done.returncode:
        print(done.stdout)
    if done.returncode not in _ENDED:
        failed = [*failed, f"pytest, with exit code {done.returncode}"]
    return Run(
        environment=environment.name,
        variables=USUAL | environment.variables,
        busy=environment.busy,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        revision=revision(),
        pytest=tuple(arguments),
        seconds=round(seconds, 1),
        exit_code=done.returncode,
        passed=passed,
        skipped=skipped,
        failed=tuple(failed),
    )


def counted(report: Path) -> tuple[int, int, list[str]]:
    """Tests that passed, tests that were skipped, and names of those that failed, of pytest's
    report. A test whose teardown fails too is named once.
    """
    if not report.exists():
        return 0, 0, []
    kinds = [
        (case, {part.tag for part in case}) for case in ElementTree.parse(report).iter("testcase")
    ]
    failed = dict.fromkeys(_name(case) for case, tags in kinds if tags & _FAILED)
    skipped = sum("skipped" in tags and not tags & _FAILED for _, tags in kinds)
    passed = sum(not tags & (_FAILED | {"skipped"}) for _, tags in kinds)
    return passed, skipped, list(failed)


def _name(case: ElementTree.Element) -> str:
    """As pytest takes it: tests/a/test_b.py::test_c[d]."""
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def revision() -> str:
    """The commit that is tested, and whether files besides results differ from it."""
    commit = _git("rev-parse", "--short=12", "HEAD").stdout.strip()
    differs = _git("diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results").returncode
    return (commit or "unknown") + (" and changes" if differs else "")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("git", "-C", str(SCRIPTS.parent), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """What is recorded: failures by test, then every run."""
    return {
        "failures_by_test": dict(Counter(chain(*(run.failed for run in runs))).most_common()),
        "holds": all(run.holds for run in runs),
        "runs": [asdict(run) for run in runs],
    }


def _kept(arguments: Sequence[str]) -> list[Run]:
    """Runs of the result that is there, of the same tests at the same revision."""
    path = results.DIRECTORY / f"{NAME}.json"
    if not path.exists():
        return []
    runs = [Run(**run) for run in json.loads(path.read_text())["runs"]]
    return [
        run for run in runs if run.revision == revision() and list(run.pytest) == list(arguments)
    ]


if __name__ == "__main__":
    sys.exit(main())
