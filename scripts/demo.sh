#!/usr/bin/env bash
# Asks a real language model a question about a long real text, with the KV cache streamed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
use_venv ""
exec .venv/bin/python scripts/demo.py "$@"
