#!/usr/bin/env bash
# Builds .venv-ffcv with the real ffcv 1.0.2, to write and read files, and for benches. CPU only.
#
#   scripts/ffcv/setup.sh      about 2 GB of disk and a minute; does nothing if it exists
#
# PYTHON=... selects another Python, 3.10 to 3.12, with headers. Downloads come from Debian and PyPI.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly VENV=.venv-ffcv
readonly REQUIREMENTS=scripts/ffcv/requirements.txt
readonly PYTHON=${PYTHON:-python3}

say() { printf 'ffcv: %s\n' "$*" >&2; }
fail() {
    printf 'ffcv: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '      %s\n' "$line" >&2; done
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

main() {
    case "${1:-}" in
    "") ;;
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
        return
        ;;
    *) fail "unknown argument '$1'" "known: --help" ;;
    esac

    # Two setups at the same time would install twice; the second waits for the first.
    if have flock; then
        exec 9<scripts/ffcv
        flock 9
    fi
    # The stamp is written last, so that an interrupted install never counts as complete. It
    # includes this script, which decides what is built.
    local stamp
    stamp="$(cat "$REQUIREMENTS" "${BASH_SOURCE[0]}" | cksum)"
    if [ "$(cat $VENV/.baton-setup 2>/dev/null)" = "$stamp" ]; then return; fi

    install_system_packages
    check_python
    say "installing ffcv 1.0.2 and torch into $VENV (a minute)"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    pip_install -r "$REQUIREMENTS"
    create_cuda_stubs
    import_ffcv
    printf '%s\n' "$stamp" >"$VENV/.baton-setup"
    say "ffcv 1.0.2 is in $VENV"
}

# --- Packages to compile libffcv.so -----------------------------------------------------------

install_system_packages() {
    # Debian's names; pkg-config's names of the two libraries that ffcv links.
    local packages=()
    have c++ && have nm || packages+=(build-essential)
    have pkg-config || packages+=(pkg-config)
    { have pkg-config && pkg-config --exists opencv4; } || packages+=(libopencv-dev)
    { have pkg-config && pkg-config --exists libturbojpeg; } || packages+=(libturbojpeg0-dev)
    have "$PYTHON" || packages+=(python3 python3-dev python3-venv)
    [ ${#packages[@]} -gt 0 ] || return 0

    local names="${packages[*]}"
    have apt-get || fail "missing here: $names" \
        "install what your distribution calls these Debian packages, then run this again"
    [ "$(id -u)" -eq 0 ] || fail "missing here: $names" \
        "run: sudo apt-get update && sudo apt-get install -y --no-install-recommends $names"
    say "installing with apt-get: $names"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${packages[@]}" </dev/null >/dev/null
}

check_python() {
    "$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || fail \
        "$PYTHON is $("$PYTHON" --version); ffcv needs numpy 1 and torch 2.11, thus Python 3.10 to 3.12" \
        "name one: PYTHON=python3.12 scripts/ffcv/setup.sh"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || fail "$PYTHON has no venv" \
        "run: apt-get install python3-venv"
    local headers
    headers=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    [ -e "$headers/Python.h" ] || fail "$PYTHON has no C headers ($headers/Python.h)" \
        "run: apt-get install python3-dev, or name another Python: PYTHON=... scripts/ffcv/setup.sh"
}

# --- The Python packages ----------------------------------------------------------------------

pip_install() {
    # pip unpacks in TMPDIR before it moves: gigabytes do not have to fit into a /tmp in memory. A
    # user's pip.conf may set `user`, which a venv forbids.
    mkdir -p "$VENV/tmp"
    TMPDIR="$PWD/$VENV/tmp" PIP_USER=0 "$VENV/bin/python" -m pip install --quiet --no-input \
        --disable-pip-version-check --no-deps "$@" || fail \
        "pip could not install what $REQUIREMENTS names (its message is above)" \
        "check that this machine reaches PyPI and has the disk space, then run this again"
    rm -rf "$VENV/tmp"
}

# PyPI's torch links CUDA libraries of 2 GB even when it never calls them. Without a GPU it never
# does, so they are replaced by libraries with the same names, and with functions that abort.
create_cuda_stubs() {
    local lib
    lib=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torch/lib
    # Every function that torch does not define, as `name` or `name@version`.
    nm -D --undefined-only --with-symbol-versions "$lib"/libtorch_*.so |
        sed -n 's/^ *U //p' | sort -u >"$VENV/undefined.txt"

    # file, version of its symbols ("-": none), and what their names begin with
    local name version prefix
    while read -r name version prefix; do
        local pattern="^\(${prefix}[A-Za-z0-9_]*\)\$"
        local link=("-Wl,-soname,$name")
        if [ "$version" != - ]; then
            pattern="^\(${prefix}[A-Za-z0-9_]*\)@*${version}\$"
            printf '%s { global: *; };\n' "$version" >"$VENV/versions.map"
            link+=("-Wl,--version-script=$VENV/versions.map")
        fi
        sed -n "s/$pattern/void \1(void) { __builtin_trap(); }/p" "$VENV/undefined.txt" |
            cc -shared -fPIC -w -x c - "${link[@]}" -o "$lib/$name"
    done <<'TABLE'
libcublas.so.13        libcublas.so.13    cublas
libcublasLt.so.13      libcublasLt.so.13  cublasLt
libcudnn.so.9          libcudnn.so.9      cudnn
libcufft.so.12         libcufft.so.12     cufft
libcusparse.so.12      libcusparse.so.12  cusparse
libcusparseLt.so.0     -                  cusparseLt
libcurand.so.10        -                  curand
libcufile.so.0         -                  cuFile
libnccl.so.2           -                  nccl
libnvshmem_host.so.3   NVSHMEM            nvshmem
TABLE
    rm -f "$VENV/undefined.txt" "$VENV/versions.map"
}

import_ffcv() {
    CUDA_VISIBLE_DEVICES='' "$VENV/bin/python" -c 'import torch, ffcv.loader, ffcv.writer
torch.ones(2, 2) @ torch.ones(2, 2)' || fail "ffcv is installed and cannot be imported (see above)" \
        "if a library is missing, add it to the table in scripts/ffcv/setup.sh"
}

main "$@"
