#!/usr/bin/env bash
# Two nodes on one machine: two network namespaces joined by a veth pair, a rank in each, started by
# torchrun. Says whether the text is that of one rank.
#
#     bash scripts/checks/two_nodes.sh MODEL [PROMPT]       with PYTHON=.venv/bin/python
#
# Runs without privileges where users may make namespaces.
set -euo pipefail
if [[ -z ${TWO_NODES:-} ]]; then
    # A namespace of users, in which this one may make networks.
    exec env TWO_NODES=1 unshare --user --map-root-user --net -- "$BASH" "$0" "$@"
fi
MODEL=$1
PROMPT=${2:-"The with statement is used to wrap the execution of a block"}
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
GENERATE=(-m triforce_core generate "$MODEL" --prompt "$PROMPT" --device cpu --temperature 0
    --max-new-tokens 24 --ctx-size 512 --quiet)
OUT=$(mktemp -d)

# The other node: a process that keeps its network alive.
unshare --net -- sleep infinity &
OTHER=$!
trap 'kill $OTHER 2>/dev/null; rm -rf "$OUT"' EXIT
while [[ $(readlink /proc/$OTHER/ns/net) == $(readlink /proc/self/ns/net) ]]; do sleep 0.1; done
ip link set lo up
ip link add node0 type veth peer name node1 netns $OTHER
ip address add 10.77.0.1/24 dev node0
ip link set node0 up
there() { nsenter --net=/proc/$OTHER/ns/net -- "$@"; }
there ip link set lo up
there ip address add 10.77.0.2/24 dev node1
there ip link set node1 up

rank() { # NODE: torchrun's part of it
    env GLOO_SOCKET_IFNAME="node$1" "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
        --node-rank "$1" --master-addr 10.77.0.1 --master-port 29577 "${GENERATE[@]}"
}
export -f rank
"$PYTHON" "${GENERATE[@]}" >"$OUT/one"
rank 0 >"$OUT/two" &
FIRST=$!
there env PYTHON="$PYTHON" "$BASH" -c "$(declare -p GENERATE); rank 1" >"$OUT/nothing"
wait $FIRST
cat "$OUT/two"
if cmp --silent "$OUT/one" "$OUT/two" && [[ ! -s $OUT/nothing ]]; then
    echo "two nodes say what one says" >&2
else
    echo "two nodes say something else" >&2
    diff "$OUT/one" "$OUT/two" >&2
    exit 1
fi
