#!/usr/bin/env bash
# Checks on a GPU machine that a `baton-worker` built elsewhere can train there: CUDA, libtorch, NCCL.
# Prints a table; exits non-zero when a check fails.
#
#   scripts/gpu/check.sh [PATH/TO/baton-worker]    default: target/gpu/baton-worker
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
# Full fp32 precision, to compare with the CPU.
export NVIDIA_TF32_OVERRIDE=0
exec "$here/env.sh" "${1:-$here/../../target/gpu/baton-worker}" gpu-check
