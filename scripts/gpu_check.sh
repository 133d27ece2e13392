#!/usr/bin/env bash
# Everything that needs a GPU, in one command of under 9 minutes, without a network: installs this
# checkout over the torch and transformers that are there, runs the GPU tests, then the benchmarks, and
# writes one JSON file. Each part has a time limit of its own, and a part that fails stops no other.
#
#     bash scripts/gpu_check.sh [RESULT.json] [MODEL.gguf]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
RESULT=${1:-benchmarks/results/gpu_check.json}
MEMORY=${MEMORY:-24GB}
PYTHON=${PYTHON:-python3}
PARTS=$(mktemp -d)
trap 'rm -rf "$PARTS"' EXIT
FAILED=0

part() { # NAME SECONDS COMMAND...: its output is PARTS/NAME.out, its log goes to stderr
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    echo "== $name: $*" >&2
    timeout "$seconds" "$@" >"$PARTS/$name.out"
    local code=$?
    echo "$code $((SECONDS - began))" >"$PARTS/$name.code"
    if ((code)); then
        FAILED=1
        echo "== $name ended with $code after $((SECONDS - began)) s" >&2
        tail -n 30 "$PARTS/$name.out" >&2
    fi
}

$PYTHON -m pip install --quiet --no-deps --no-build-isolation -e . || exit 1
part env 60 triforce env
cat "$PARTS/env.out" >&2
part tests 200 $PYTHON -m pytest -q -m gpu -x --maxfail=20 -p no:cacheprovider tests/gpu
tail -n 5 "$PARTS/tests.out" >&2
BENCH=(triforce bench --device cuda:0 --dtype float16 --device-memory "$MEMORY" --output json)
part llama2-7b 200 "${BENCH[@]}" --shape llama2-7b --context 131072 --repeats 3
part llama2-7b-no-graphs 40 "${BENCH[@]}" --shape llama2-7b --context 8192 --tests retrieval,drafter --no-graphs
part llama3.1-8b 60 "${BENCH[@]}" --shape llama3.1-8b --context 131072 --repeats 3 --tests pass,retrieval
part offloaded-cache 100 $PYTHON scripts/bench_offloaded_cache.py --shape llama2-7b --context 131072
$PYTHON scripts/gather_parts.py "$PARTS" "$RESULT" "$MEMORY"
exit $FAILED
