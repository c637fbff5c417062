#!/usr/bin/env bash
# Races a training step of Baton on this machine's GPU against PyTorch, eager and compiled. Needs a `baton-worker`
# and PyTorch, no Rust. The last line of output is "RESULT {...}".
#
#   scripts/gpu/bench.sh [PATH/TO/baton-worker] [OPTION...]    default: target/gpu/baton-worker
#
#   --rounds N        runs of each side, alternating (3 without it)
#   --sides N,N,N     sides of the images in pixels (160,192,224); compiled only at the last
#   --batch N         images per step (256)
#   --steps N         steps measured in each run (40)
#   --compute FORMAT  bf16, fp16 or fp32 (bf16)
#   --data FILE       beton file for the run with real input (assets/digits/, its images enlarged)
#   --decode-threads N  of that run (all cores but two)
#   --device cpu      try out the bench itself where there is no GPU, e.g. with --arch resnet18 --sides 64 --batch 4
#
# PYTHON names the interpreter that has PyTorch (default: python3). What each run printed stays in gpu-bench/ beside
# the worker.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
worker=$here/../../target/gpu/baton-worker
case "${1:-}" in
-h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
    exit
    ;;
-* | "") ;;
*)
    worker=$1
    shift
    ;;
esac
export PYTHONDONTWRITEBYTECODE=1
race=("${PYTHON:-python3}" "$here/race.py" --worker "$worker" "$@")
case " $* " in
# libtorch as the worker was built with it.
*" --device cpu "*) exec "${race[@]}" ;;
esac
exec "$here/env.sh" --for "$worker" "${race[@]}"
