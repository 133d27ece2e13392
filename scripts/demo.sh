#!/usr/bin/env bash
# A real language model answers a question about a long text, whose KV cache is streamed: first by
# plain decoding, then with drafts. No GPU is needed.
#
#   bash scripts/demo.sh            one answer, without and with drafts
#   bash scripts/demo.sh --weights  stream the weights as well
#   bash scripts/demo.sh --chat     talk to the model
#   bash scripts/demo.sh --serve    serve it, with a page on http://127.0.0.1:8080
#
# Further options are those of `triforce generate`, `chat` or `serve`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
show_help "$@"
extras=""
[ "${1:-}" = "--serve" ] && extras="[server]"
use_venv "$extras"
exec .venv/bin/python scripts/demo.py "$@"
