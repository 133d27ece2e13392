# Sourced by the Dockerfile and scripts/checks/wheel.sh, for /bin/sh: builds the packages and installs
# the wheel with the versions of constraints.txt.

build_packages() { # PYTHON SOURCE OUT: the source archive, and the wheel of that archive
    "$1" -m pip install --quiet -c "$2/constraints.txt" build &&
        "$1" -m build --outdir "$3" "$2"
}

install_wheel() { # PYTHON CONSTRAINTS WHEEL: the server and grammars included
    "$1" -m pip install --quiet -c "$2" "$3[server,grammar]" &&
        "$1" -m pip check
}
