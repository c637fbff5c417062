#!/usr/bin/env bash
# Compares Baton with PyTorch and ffcv by running them:
# - networks, optimizers, training curves, schedules, mixed batches and an exported model with torch and
#   torchvision; fails if an error is above its tolerance (parity.py and its modules);
# - the data sets of `baton data write` with the samples that the real ffcv reads from them.
#
#     scripts/parity/run.sh                everything
#     scripts/parity/run.sh curves ffcv    some parts: models programs costs updates curves schedules mixing export ffcv
#
# Needs about 5 GB of disk for .venv-parity and .venv-ffcv, created once, and 8 GB in $TMPDIR; ten minutes on two
# cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

torch_parts=()
ffcv=no
if [ $# -eq 0 ]; then ffcv=yes; fi
for part; do
    if [ "$part" = ffcv ]; then ffcv=yes; else torch_parts+=("$part"); fi
done

if [ $# -eq 0 ] || [ ${#torch_parts[@]} -gt 0 ]; then
    scripts/parity/setup.sh
    venv=.venv-parity
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    parity=("$venv/bin/python" scripts/parity/parity.py)
    "${parity[@]}" reference "$work" "${torch_parts[@]}"
    cargo run --quiet --package baton-trainer --example parity -- "$work"
    "${parity[@]}" compare "$work"
fi

if [ "$ffcv" = yes ]; then
    scripts/ffcv/setup.sh
    .venv-ffcv/bin/python scripts/parity/ffcv_write.py "${CARGO_TARGET_DIR:-target}/debug/baton"
fi
