#!/usr/bin/env bash
# Lint and tests, a process a core (four at most). Arguments go to pytest; --all runs slow tests and
# whole grids too, --part 0/3 a third of these.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_venv "${EXTRAS:-[test,docs]}"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Tiny models gain nothing from threads, and threads of several processes wait for one another.
export OMP_NUM_THREADS=1
# What tests with two threads all the same: those sleep while they wait.
export OMP_WAIT_POLICY=passive
# Not `python -m pytest`, which would put this folder, and kernels/ in it, on the import path.
exec .venv/bin/pytest -n auto --maxprocesses 4 --dist worksteal --durations 30 "$@"
