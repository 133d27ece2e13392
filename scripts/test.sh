#!/usr/bin/env bash
# Lint and tests, in a process for each core (four at most).
#
#   bash scripts/test.sh             the usual tests
#   bash scripts/test.sh --all       slow tests and whole grids too
#   bash scripts/test.sh --part 0/3  the usual tests, and a third of the slow ones
#
# Further arguments go to pytest, such as -k NAME or a file.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
show_help "$@"
use_venv "${EXTRAS:-[test,docs]}"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Tiny models gain nothing from threads, and threads of several processes wait for one another.
export OMP_NUM_THREADS=1
# What tests with two threads all the same: those sleep while they wait.
export OMP_WAIT_POLICY=passive
# Not `python -m pytest`, which would put this folder, and kernels/ in it, on the import path.
exec .venv/bin/pytest -n auto --maxprocesses 4 --dist worksteal --durations 30 "$@"
