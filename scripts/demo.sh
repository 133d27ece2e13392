#!/usr/bin/env bash
# Asks a real language model a question about a long real text, with the KV cache streamed; or, with
# --chat or --serve, lets a person talk to it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
extras=""
[ "${1:-}" = "--serve" ] && extras="[server]"
use_venv "$extras"
exec .venv/bin/python scripts/demo.py "$@"
