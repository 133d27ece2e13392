#!/usr/bin/env bash
# Everything that needs a GPU, in one command of ten minutes at most, without a network: installs this
# checkout over the torch and transformers that are there, runs the benchmarks and the GPU tests, most
# important first, and writes one JSON file. Each part has a time limit of its own, and all together
# have BUDGET seconds: a part that does not begin within them is named in the file. A part that fails
# stops no other, and the file is written again after each.
#
#     bash scripts/gpu_check.sh [RESULT.json]       with MEMORY=24GB, PYTHON=python3, BUDGET=570
#     LARGE=1 bash scripts/gpu_check.sh RESULT.json  a model larger than the GPU alone, in 70 GB of host
#     SPLIT=1 bash scripts/gpu_check.sh RESULT.json  split formats beside what they take the place of
#     RECURRENT=1 bash scripts/gpu_check.sh RESULT.json  a model with recurrent layers, and their kernels
#     EXPERTS=1 bash scripts/gpu_check.sh RESULT.json  a model with experts, and products with them
#     SAME_BITS=1 bash scripts/gpu_check.sh RESULT.json  what --same-bits on costs, and whether it holds;
#         with MODEL=FILE also texts of a real model
#     PROCESSOR=1 bash scripts/gpu_check.sh RESULT.json  weights and KV that stream, and what the
#         processor computes of them (LITTLE=8GB of device memory for the weights)
#     GRAPHS=1 bash scripts/gpu_check.sh RESULT.json  passes that stream nothing, with and without
#         CUDA graphs
#     SIMULATED_GPU=1 bash scripts/gpu_check.sh RESULT.json  every line of it on tiny shapes, without a
#         GPU, on the test double of tests/simulated_gpu: its figures say nothing
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SECONDS=0
RESULT=${1:-benchmarks/results/gpu_check.json}
MEMORY=${MEMORY:-24GB}
LITTLE=${LITTLE:-8GB}
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-570}
# Or this folder, and kernels/ in it, would come before the packages of those names.
export PYTHONSAFEPATH=1
PARTS=$(mktemp -d)
trap 'rm -rf "$PARTS"' EXIT
FAILED=0
# Times the limit of each part: a simulation is slow.
PATIENCE=1

part() { # NAME SECONDS COMMAND...: its output is PARTS/NAME.out, its log goes to stderr
    local name=$1 seconds=$(($2 * PATIENCE)) began=$SECONDS code left=$((BUDGET - SECONDS))
    shift 2
    if ((left < 15)); then
        FAILED=1
        echo "== $name was not begun: ${BUDGET} s are over" >&2
        echo "not begun within $BUDGET seconds" >"$PARTS/$name.out"
        echo "124 0" >"$PARTS/$name.code"
    else
        echo "== $name: $*" >&2
        # An interrupt first: what was measured until then is still printed.
        timeout -s INT -k 10 "$((seconds < left ? seconds : left))" "$@" >"$PARTS/$name.out"
        code=$?
        echo "$code $((SECONDS - began))" >"$PARTS/$name.code"
        tail -n 40 "$PARTS/$name.out" >&2
        if ((code)); then
            FAILED=1
            echo "== $name ended with $code after $((SECONDS - began)) s" >&2
        fi
    fi
    $PYTHON scripts/gather_parts.py "$PARTS" "$RESULT" "$MEMORY" >&2
}

# The simulation runs what is installed already: a test of the suite runs it beside others.
[[ ${SIMULATED_GPU:-} ]] || $PYTHON -m pip install --quiet --no-deps --no-build-isolation -e . || exit 1
# The checkout is installed without what it needs. Without these, most parts would fail one by one.
$PYTHON -c "import gguf, psutil, pytest, rich, transformers" || {
    echo "install the package that is missing, such as: $PYTHON -m pip install --no-deps gguf" >&2
    exit 1
}
LLAMA2=llama2-7b LLAMA3=llama3.1-8b QWEN=qwen2.5-32b RECURRENT_SHAPE=qwen3.5-9b
SPARSE=lfm2-8b-a1b EXPERTS_OF=qwen3-30b-a3b LONG=131072 SHORT=8192 REPEATS=3 CALLS=9
GPU_TESTS=(tests/gpu) GRAPH_TESTS=(tests/gpu/test_graphs.py tests/gpu/test_heads.py)
# Those of the processor's kernels need a newer transformers.
ROW_TESTS=(tests/gpu/test_rows_on_a_gpu.py --all) SAME=(off on)
FORMATS=("split split" "dense dense" "dense split" "split dense") SHARES=(off auto 0.5 1)
EXPERT_TESTS=(tests/kernels/test_experts.py tests/kernels/test_by_heads.py)
KERNEL_TESTS=(tests/kernels tests/core/decoding/test_kernels.py --ignore=tests/kernels/test_host_kernels.py)
if [[ ${SIMULATED_GPU:-} ]]; then
    BUDGET=3000 PATIENCE=10
    eval "$($PYTHON tests/simulated_gpu/processes.py)"
    # Benchmarks time the references: Triton's interpreter would take hours.
    export TRIFORCE_KERNELS=reference
    cp tests/simulated_gpu/tiny_shape.json "$PARTS/tiny.json"
    cp tests/simulated_gpu/tiny_recurrent_shape.json "$PARTS/recurrent.json"
    cp tests/simulated_gpu/tiny_sparse_shape.json "$PARTS/sparse.json"
    RECURRENT_SHAPE=$PARTS/recurrent.json SPARSE=$PARTS/sparse.json EXPERTS_OF=$PARTS/sparse.json
    LLAMA2=$PARTS/tiny.json LLAMA3=$PARTS/tiny.json QWEN=$PARTS/tiny.json LONG=512 SHORT=256 MEMORY=2GB LITTLE=2GB
    REPEATS=1 CALLS=1
    GPU_TESTS=(tests/gpu/test_device.py -k "pinned or staged")
    GRAPH_TESTS=(tests/gpu/test_graphs.py -k garbage)
    # References do not keep the same bits.
    ROW_TESTS=(tests/gpu/test_rows_on_a_gpu.py -k refused) SAME=(off)
    EXPERT_TESTS=(tests/kernels/test_experts.py -k chosen)
    KERNEL_TESTS=(tests/kernels/test_layer.py tests/kernels/test_gather.py)
    FORMATS=("split dense" "dense split") SHARES=(auto 0.5) RECURRENT_TESTS="formula or convolutions"
fi
TRIFORCE=("$PYTHON" -m triforce_core.cli)
BENCH=("${TRIFORCE[@]}" bench --device cuda:0 --dtype float16 --device-memory "$MEMORY" --output json)
PYTEST=("$PYTHON" -m pytest -q --maxfail=100 -p no:cacheprovider --continue-on-collection-errors)
if [[ ${LARGE:-} ]]; then
    # Layers in 16 bits stream, and copies of them in 4 bits draft.
    part qwen2.5-32b 500 "${BENCH[@]}" --dtype bfloat16 --shape "$QWEN" --context $((LONG / 4)) \
        --repeats $REPEATS --tests pass,retrieval
    exit $FAILED
fi
if [[ ${SPLIT:-} ]]; then
    # One shape with weights and KV as they are, and with either or both split; then the kernels.
    for how in "${FORMATS[@]}"; do
        read -r weights kv <<<"$how"
        part "llama3.1-8b, weights $weights, KV $kv" 110 "${BENCH[@]}" --dtype bfloat16 \
            --shape "$LLAMA3" --context $LONG --repeats $REPEATS --tests pass,retrieval \
            --weights "$weights" --kv "$kv"
    done
    part bench-kernels 60 "$PYTHON" scripts/bench kernels --split --json --shape "$LLAMA3" \
        --context $LONG --repeats $CALLS
    exit $FAILED
fi
if [[ ${RECURRENT:-} ]]; then
    # Only one of four layers has KV, so a long context costs little.
    for context in $SHORT $LONG; do
        part "qwen3.5-9b, $context tokens" 200 "${BENCH[@]}" --dtype bfloat16 \
            --shape "$RECURRENT_SHAPE" --context "$context" --repeats $REPEATS
    done
    part recurrent-kernels 120 env TRIFORCE_KERNELS= "${PYTEST[@]}" tests/kernels/test_recurrent.py \
        -k "${RECURRENT_TESTS:-not compile}"
    exit $FAILED
fi
if [[ ${EXPERTS:-} ]]; then
    part bench-kernels 60 "$PYTHON" scripts/bench kernels --experts --json --shape "$EXPERTS_OF" \
        --repeats $CALLS
    part lfm2-8b-a1b 200 "${BENCH[@]}" --dtype bfloat16 --shape "$SPARSE" --context $SHORT \
        --repeats $REPEATS --tests pass,prefill,decode
    part expert-kernels 120 env TRIFORCE_KERNELS= "${PYTEST[@]}" "${EXPERT_TESTS[@]}"
    part tests 120 "${PYTEST[@]}" -m gpu tests/gpu/test_experts_on_a_gpu.py
    exit $FAILED
fi
if [[ ${SAME_BITS:-} ]]; then
    for how in "${SAME[@]}"; do
        part "llama3.1-8b, same bits $how" 60 "${BENCH[@]}" --dtype bfloat16 --shape "$LLAMA3" \
            --context $SHORT --repeats $REPEATS --tests pass,prefill --weights dense --kv dense \
            --same-bits $how
    done
    part rows 150 env TRIFORCE_KERNELS= "${PYTEST[@]}" -m gpu "${ROW_TESTS[@]}"
    [[ ${MODEL:-} ]] && part texts 200 "$PYTHON" scripts/checks same_bits --device cuda:0 \
        --model "$MODEL" --prompts 5 --tokens 64 --result "$PARTS/texts.json"
    exit $FAILED
fi
if [[ ${GRAPHS:-} ]]; then
    for model in "llama3.1-8b $LLAMA3" "qwen3.5-9b $RECURRENT_SHAPE"; do
        read -r name shape <<<"$model"
        for how in "" --no-graphs; do
            part "$name, ${how:-with graphs}" 100 "${BENCH[@]}" --dtype bfloat16 --shape "$shape" \
                --context $SHORT --repeats $CALLS --tests pass,decode --weights dense --kv dense $how
        done
    done
    part tests 130 "${PYTEST[@]}" -m gpu "${GRAPH_TESTS[@]}"
    exit $FAILED
fi
if [[ ${PROCESSOR:-} ]]; then
    part env 60 "${TRIFORCE[@]}" env --probe
    for share in "${SHARES[@]}"; do
        streamed=("${BENCH[@]}" --dtype bfloat16 --shape "$LLAMA3" --repeats $REPEATS --tests pass
            --weights dense --kv dense --host-compute $share)
        part "llama3.1-8b, weights, processor $share" 70 "${streamed[@]}" --context $SHORT \
            --device-memory "$LITTLE"
        part "llama3.1-8b, KV, processor $share" 70 "${streamed[@]}" --context $LONG
    done
    exit $FAILED
fi
part env 20 "${TRIFORCE[@]}" env
part llama2-7b 130 "${BENCH[@]}" --shape "$LLAMA2" --context $LONG --repeats $REPEATS
# These look at the memory of the whole device: one process.
part tests 155 "${PYTEST[@]}" -m gpu "${GPU_TESTS[@]}"
part bench-kernels 50 "$PYTHON" scripts/bench kernels --json --shape "$LLAMA2" --context $LONG \
    --repeats $CALLS
part llama3.1-8b 40 "${BENCH[@]}" --shape "$LLAMA3" --context $LONG --repeats $REPEATS \
    --tests pass,retrieval
part offloaded-cache 60 "$PYTHON" scripts/bench offloaded_cache --json --shape "$LLAMA2" \
    --context $((LONG - 8)) --memory "$MEMORY"
# Kernels compile on one core each, about 170 of them: with pytest-xdist on several at once, into a
# cache that what follows finds.
WORKERS=()
"$PYTHON" -c "import xdist" 2>/dev/null && WORKERS=(-n "$(($(nproc) < 8 ? $(nproc) : 8))")
part kernels 90 env TRIFORCE_KERNELS= "${PYTEST[@]}" "${WORKERS[@]}" "${KERNEL_TESTS[@]}" \
    -k "not compile"
part reference 20 env TRIFORCE_KERNELS=reference "${BENCH[@]}" --shape "$LLAMA2" --context $SHORT \
    --tests retrieval,drafter
exit $FAILED
