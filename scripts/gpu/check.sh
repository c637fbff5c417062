#!/usr/bin/env bash
# Checks on a GPU machine that a `baton-worker` built elsewhere can train there: CUDA, libtorch, NCCL.
# Prints a table; exits non-zero when a check fails.
#
#   scripts/gpu-check.sh [PATH/TO/baton-worker]    default: target/gpu/baton-worker
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
worker="${1:-$here/../target/gpu/baton-worker}"

if [ ! -e /proc/driver/nvidia/version ] && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "no NVIDIA driver here: run scripts/gpu-check.sh on a GPU machine with target/gpu/baton-worker" >&2
    exit 1
fi
if [ ! -x "$worker" ]; then
    echo "gpu-check: no worker at $worker: run 'make gpu-check' where Baton was built, and bring it here" >&2
    exit 1
fi
# The build machine's C library must not be newer than this one's.
if unmet="$(ldd "$worker" 2>&1 | grep -o 'GLIBC[A-Z]*_[0-9.]*. not found')"; then
    echo "gpu-check: $worker was built on a newer system than this (${unmet%%$'\n'*}): build it on this system's release" >&2
    exit 1
fi

"$here/gpu-env.sh" "$worker" gpu-check
