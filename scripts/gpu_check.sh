#!/usr/bin/env bash
# Everything that needs a GPU, in one command of 9 and a half minutes, without a network: installs this
# checkout over the torch and transformers that are there, runs the GPU tests, then the benchmarks, and
# writes one JSON file. Each part has a time limit of its own; a part that fails stops no other, and the
# file is written again after each.
#
#     bash scripts/gpu_check.sh [RESULT.json]       with MEMORY=24GB, PYTHON=python3
#     LARGE=1 bash scripts/gpu_check.sh RESULT.json  a model larger than the GPU alone, in 70 GB of host
#     PLANES=1 bash scripts/gpu_check.sh RESULT.json  planes beside what they take the place of, in 8 minutes
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
RESULT=${1:-benchmarks/results/gpu_check.json}
MEMORY=${MEMORY:-24GB}
PYTHON=${PYTHON:-python3}
# Or this folder, and kernels/ in it, would come before the packages of those names.
export PYTHONSAFEPATH=1
PARTS=$(mktemp -d)
trap 'rm -rf "$PARTS"' EXIT
FAILED=0

part() { # NAME SECONDS COMMAND...: its output is PARTS/NAME.out, its log goes to stderr
    local name=$1 seconds=$2 began=$SECONDS code
    shift 2
    echo "== $name: $*" >&2
    # An interrupt first: what was measured until then is still printed.
    timeout -s INT -k 10 "$seconds" "$@" >"$PARTS/$name.out"
    code=$?
    echo "$code $((SECONDS - began))" >"$PARTS/$name.code"
    tail -n 40 "$PARTS/$name.out" >&2
    if ((code)); then
        FAILED=1
        echo "== $name ended with $code after $((SECONDS - began)) s" >&2
    fi
    $PYTHON scripts/gather_parts.py "$PARTS" "$RESULT" "$MEMORY" >&2
}

$PYTHON -m pip install --quiet --no-deps --no-build-isolation -e . || exit 1
TRIFORCE=("$PYTHON" -m triforce_core.cli)
BENCH=("${TRIFORCE[@]}" bench --device cuda:0 --dtype float16 --device-memory "$MEMORY" --output json)
PYTEST=("$PYTHON" -m pytest -q --maxfail=30 -p no:cacheprovider --continue-on-collection-errors)
if [[ ${LARGE:-} ]]; then
    # Layers in 16 bits stream, and copies of them in 4 bits draft.
    part qwen2.5-32b 500 "${BENCH[@]}" --dtype bfloat16 --shape qwen2.5-32b --context 32768 \
        --repeats 3 --tests pass,retrieval
    exit $FAILED
fi
if [[ ${PLANES:-} ]]; then
    # Their kernels, then one shape with weights and KV as they are, and with either or both in planes.
    part bench-kernels 60 "$PYTHON" scripts/bench_kernels.py --planes --json --shape llama3.1-8b
    for how in "dense dense" "dense planes" "planes dense" "planes planes"; do
        read -r weights kv <<<"$how"
        part "llama3.1-8b, weights $weights, KV $kv" 100 "${BENCH[@]}" --dtype bfloat16 \
            --shape llama3.1-8b --context 131072 --repeats 3 --tests pass,retrieval \
            --weights "$weights" --kv "$kv"
    done
    exit $FAILED
fi
# Kernels compile on one core each, about 170 of them: with pytest-xdist on several at once, into a
# cache that what follows finds.
WORKERS=()
"$PYTHON" -c "import xdist" 2>/dev/null && WORKERS=(-n "$(($(nproc) < 8 ? $(nproc) : 8))")
part env 20 "${TRIFORCE[@]}" env
part kernels 90 "${PYTEST[@]}" "${WORKERS[@]}" \
    tests/kernels tests/core/decoding/test_kernels.py -k "not compile"
# These look at the memory of the whole device: one process.
part tests 160 "${PYTEST[@]}" -m gpu tests/gpu
part bench-kernels 50 "$PYTHON" scripts/bench_kernels.py --json
part llama2-7b 130 "${BENCH[@]}" --shape llama2-7b --context 131072 --repeats 3
part offloaded-cache 60 "$PYTHON" scripts/bench_offloaded_cache.py --shape llama2-7b --memory "$MEMORY"
part llama3.1-8b 30 "${BENCH[@]}" --shape llama3.1-8b --context 131072 --repeats 3 \
    --tests pass,retrieval
part reference 20 env TRIFORCE_KERNELS=reference "${BENCH[@]}" --shape llama2-7b --context 8192 \
    --tests retrieval,drafter
exit $FAILED
