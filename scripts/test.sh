#!/usr/bin/env bash
# Lint and tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_venv "[test]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Not `python -m pytest`, which would put this folder, and kernels/ in it, on the import path.
exec .venv/bin/pytest "$@"
