"""Run the default test suite beside busy processes, and as on other processors.

Runs beside two busy processes come first. In the other runs, one of PyTorch's libraries or the
processor's kernels use an older instruction set or none, or the number of threads is one or four.
The result is written after every run.

    python scripts/checks suite_everywhere [--runs 10] [--only NAME ...] [--resume] [-- ...]

Arguments after `--` go to pytest: `-- tests/offload -k batch`. Failures are counted by test. Writes
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from checks.demo_under_load import busy_processes
from frame import ROOT, Benchmark, Figures, Option, result_path

NAME = "suite_everywhere"
# The same command as in scripts/test.sh.
SUITE = (
    *(sys.executable, "-P", "-m", "pytest", "-q"),
    *("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"),
)
USUAL = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
# pytest exits with 0 if all tests passed and with 1 if some failed. Other codes mean that it did
# not run them.
_ENDED = (0, 1)
_FAILED = {"failure", "error"}


@dataclass(frozen=True)
class Environment:
    """The environment of a run.

    variables: environment variables, over the usual ones
    busy: the number of other processes that each keep a processor busy
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
    Environment("vectors-avx2", {"TRIFORCE_VECTORS": "avx2"}),
    Environment("vectors-plain", {"TRIFORCE_VECTORS": "plain"}),
    Environment("references", {"TRIFORCE_KERNELS": "reference"}),
    Environment("threads-1", {"OMP_NUM_THREADS": "1"}),
    Environment("threads-4", {"OMP_NUM_THREADS": "4"}),
)
# A run sees only those of these variables that it sets itself.
_VARIED = {name for each in ENVIRONMENTS for name in each.variables}


@dataclass(frozen=True)
class Run:
    """One run of the suite.

    exit_code: that of pytest. failed: the names of failed tests, in order
    """

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


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    asked = [each for each in ENVIRONMENTS if not args.only or each.name in args.only]
    wanted = [each for each in asked for _ in range(args.runs if each is BUSY else 1)]
    runs = _kept(args.result or NAME, args.pytest) if args.resume else []
    yield {**summary(runs), "runs": [asdict(run) for run in runs]}
    made = Counter(run.environment for run in runs)
    for number, environment in enumerate(wanted, 1):
        if made[environment.name]:
            made[environment.name] -= 1
            continue
        run = suite(environment, args.pytest)
        runs.append(run)
        print(
            f"run {number} of {len(wanted)}, {run.environment}: {run.passed} passed, "
            f"{len(run.failed)} failed, {run.seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        yield {**summary(runs), "runs": [asdict(run)]}


def summary(runs: Sequence[Run]) -> Figures:
    failures = Counter(chain(*(run.failed for run in runs)))
    return {
        "failures_by_test": dict(failures.most_common()),
        "holds": all(run.holds for run in runs),
    }


def suite(environment: Environment, arguments: Sequence[str]) -> Run:
    """Run the suite once. If it fails, print pytest's output."""
    usual = {name: value for name, value in os.environ.items() if name not in _VARIED}
    with tempfile.TemporaryDirectory() as directory, busy_processes(environment.busy):
        report = Path(directory) / "report.xml"
        began = time.perf_counter()
        done = subprocess.run(
            [*SUITE, f"--junit-xml={report}", *arguments],
            cwd=ROOT,
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
    """Return the number of passed tests, that of skipped tests and the names of failed tests.

    The figures come from pytest's report. A test that fails again in its teardown is named once.
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
    """Return the name as pytest accepts it: tests/a/test_b.py::test_c[d]."""
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def revision() -> str:
    """Return the tested commit, and whether files other than results differ from it."""
    commit = _git("rev-parse", "--short=12", "HEAD").stdout.strip()
    differs = _git("diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results").returncode
    return (commit or "unknown") + (" and changes" if differs else "")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _kept(name: str, arguments: Sequence[str]) -> list[Run]:
    """Return the runs of an existing result for the same tests at the same revision."""
    path = result_path(name)
    if not path.exists():
        return []
    runs = [Run(**run) for run in json.loads(path.read_text())["runs"]]
    return [
        run for run in runs if run.revision == revision() and list(run.pytest) == list(arguments)
    ]


main = Benchmark(
    __doc__,
    NAME,
    measure,
    (
        Option("--runs", 10, "runs beside two busy processes"),
        Option(
            "--only",
            (),
            f"run in these alone: {', '.join(each.name for each in ENVIRONMENTS)}",
            choices=[each.name for each in ENVIRONMENTS],
            metavar="NAME",
        ),
        Option("--resume", False, "keep the result's runs of this revision and these arguments"),
        Option("pytest", (), "arguments of pytest, after `--`", nargs="*"),
    ),
)
