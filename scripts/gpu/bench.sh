#!/usr/bin/env bash
# Compares a training step of Baton on this machine's GPU with PyTorch, eager and compiled. Requires a `baton-worker`
# and PyTorch, but not Rust. The last line of output is "RESULT {...}".
#
#   scripts/gpu/bench.sh [PATH/TO/baton-worker] [OPTION...]    default: target/gpu/baton-worker
#
#   --rounds N        runs of each side, alternating (default: 3)
#   --sides N,N,N     sides of the images in pixels (160,192,224); compiled PyTorch only at the last
#   --batch N         images per step (256)
#   --steps N         steps measured in each run (40)
#   --compute FORMAT  bf16, fp16 or fp32 (bf16)
#   --data FILE       beton file for the run with real input (assets/digits/, its images enlarged)
#   --decode-threads N  decode threads of that run (all cores but two)
#   --language        LoRA and QLoRA instead, against PEFT; options of language.py may follow. Requires transformers,
#                     tokenizers and peft, and the other programs beside the worker
#   --device cpu      test the bench itself without a GPU, e.g. with --arch resnet18 --sides 64 --batch 4
#
# PYTHON names the interpreter that has PyTorch (default: python3). The output of each run is in gpu-bench/ next
# to the worker.
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
if [ "${1:-}" = --language ]; then
    shift
    programs=$(dirname "$worker")
    race=("${PYTHON:-python3}" "$here/language.py" --programs "$programs" --work "$programs/gpu-bench/language" "$@")
fi
case " $* " in
# With the libtorch of the worker's build.
*" --device cpu "*) exec "${race[@]}" ;;
esac
exec "$here/env.sh" --for "$worker" "${race[@]}"
