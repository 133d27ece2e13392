#!/usr/bin/env bash
# Makes .venv-rivals for scripts/rivals compare, with DeepSpeed and llama.cpp (the wheel xllamacpp), and
# has DeepSpeed build its helper: a minute that no measurement should contain. What it takes besides
# is pinned in constraints.txt, PyTorch among it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv-rivals/bin/python ]; then
    "${PYTHON:-python3}" -m venv .venv-rivals
fi
.venv-rivals/bin/python -m pip install --quiet --disable-pip-version-check \
    -c constraints.txt torch numpy transformers accelerate deepspeed ninja xllamacpp
export PATH="$PWD/.venv-rivals/bin:$PATH"
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29555}"
DS_ACCELERATOR="$(.venv-rivals/bin/python -c \
    'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')"
export DS_ACCELERATOR
.venv-rivals/bin/python -P - <<'END'
import deepspeed
import torch

deepspeed.init_distributed()
model = torch.nn.Linear(8, 8)
zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
deepspeed.initialize(
    model=model,
    config_params={"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1},
)
print(f"DeepSpeed {deepspeed.__version__} is ready")
END
