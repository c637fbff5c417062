#!/usr/bin/env bash
# Runs a command with libtorch and NCCL from this machine's Python packages, so that a GPU machine
# needs a `baton-worker` and PyTorch, but not Rust or a checkout with .libtorch/.
#
#   scripts/gpu/env.sh target/gpu/baton-worker gpu-check
#   scripts/gpu/env.sh --for target/gpu/baton-worker COMMAND...    a command that starts that worker
#
# PYTHON names the interpreter that has PyTorch (default: python3).
set -euo pipefail

# The version that tch 0.24 binds; the same as in scripts/setup.sh.
readonly TORCH_VERSION=2.11.0
readonly PYTHON=${PYTHON:-python3}

fail() {
    printf 'gpu-env: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '         %s\n' "$line" >&2; done
    exit 1
}

worker=${1:-}
if [ "$worker" = --for ]; then
    worker=${2:-}
    shift $(($# > 1 ? 2 : 1))
fi
[ $# -gt 0 ] || fail "no command given" "usage: scripts/gpu/env.sh [--for WORKER] COMMAND [ARGUMENT...]"
if [ ! -e /proc/driver/nvidia/version ] && ! nvidia-smi -L >/dev/null 2>&1; then
    fail "no NVIDIA driver here" "run this on a GPU machine, with scripts/gpu/ and the worker copied over"
fi
[ -x "$worker" ] || fail "no worker at '$worker'" "run 'make gpu-programs' where Baton was built, and copy it here"
# The build machine's C library must not be newer than this one's.
if unmet="$(ldd "$worker" 2>&1 | grep -o 'GLIBC[A-Z]*_[0-9.]*. not found')"; then
    fail "$worker was built on a newer system than this (${unmet%%$'\n'*})" "build it on this system's release"
fi
command -v "$PYTHON" >/dev/null || fail "'$PYTHON' was not found" "PYTHON=/path/to/python3 names another"

# Four lines: PyTorch's version, its folder, and the folders of NCCL and of CUDA's other libraries (NVRTC, CUPTI)
# or nothing. PyTorch itself is not imported: that takes seconds, and would fail without a clear message.
if ! found="$(
    "$PYTHON" - <<'PY'
import importlib.util, pathlib, re, sys

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit(1)
torch = pathlib.Path(spec.origin).parent
print(re.search(r"__version__ = '([^']*)'", (torch / "version.py").read_text()).group(1))
print(torch)
for folder, library in ("nvidia/nccl/lib", "libnccl.so.2"), ("nvidia/cu13/lib", "libnvrtc.so.13"):
    entries = (torch.parent, *map(pathlib.Path, sys.path))
    print(next((entry / folder for entry in entries if (entry / folder / library).exists()), ""))
PY
)"; then
    fail "$PYTHON has no PyTorch" "run: $PYTHON -m pip install torch==$TORCH_VERSION"
fi
{
    read -r version
    read -r torch
    # Empty or missing if there is none.
    read -r nccl || true
    read -r cuda || true
} <<<"$found"

[ "${version%%+*}" = "$TORCH_VERSION" ] || fail "PyTorch is $version; the worker needs $TORCH_VERSION" \
    "run: $PYTHON -m pip install torch==$TORCH_VERSION"
[ -e "$torch/lib/libtorch_cuda.so" ] || fail "PyTorch in $torch is built without CUDA" \
    "install the wheel from PyPI, which has it: $PYTHON -m pip install torch==$TORCH_VERSION"

# PyTorch can also bring NCCL from the system (NVIDIA's containers do).
if [ -n "$nccl" ]; then
    library="$nccl/libnccl.so.2"
else
    library="$(/sbin/ldconfig -p 2>/dev/null | sed -n 's/.*libnccl\.so\.2 .*=> //p' | head -n 1 || true)"
    [ -n "$library" ] || fail "NCCL (libnccl.so.2) was not found" \
        "run: $PYTHON -m pip install nvidia-nccl-cu13"
fi

# cudarc opens `libnccl.so`, and the wheels carry only the versioned name.
links="$(mktemp -d)"
trap 'rm -rf "$links"' EXIT
ln -s "$library" "$links/libnccl.so"

echo "gpu-env: PyTorch $version in $torch, NCCL in $library" >&2
LD_LIBRARY_PATH="$links:$torch/lib${cuda:+:$cuda}:$(dirname "$library")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$@"
