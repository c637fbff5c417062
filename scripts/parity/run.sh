#!/usr/bin/env bash
# Compares Baton with PyTorch and ffcv by running them:
# - networks, optimizers, training curves, schedules, mixed batches and an exported model with torch and
#   torchvision; fails if an error is above its tolerance (parity.py and its modules);
# - language models with adapters, with transformers and PEFT;
# - the Python package: networks that `baton.export` writes, and that `baton.compare` must find equal, bit by bit
#   (python/tests);
# - the data sets of `baton data write` with the samples that the real ffcv reads from them.
#
#     scripts/parity/run.sh                everything
#     scripts/parity/run.sh curves ffcv    some parts: models programs language costs updates curves schedules mixing export
#                                          python ffcv
#
# Needs about 5 GB of disk for .venv-parity and .venv-ffcv, created once, and 8 GB in $TMPDIR; ten minutes on two
# cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

torch_parts=()
package=no
ffcv=no
if [ $# -eq 0 ]; then package=yes ffcv=yes; fi
for part; do
    case "$part" in
    python) package=yes ;;
    ffcv) ffcv=yes ;;
    *) torch_parts+=("$part") ;;
    esac
done
programs=${CARGO_TARGET_DIR:-target}/debug
venv=.venv-parity

if [ $# -eq 0 ] || [ ${#torch_parts[@]} -gt 0 ]; then
    scripts/parity/setup.sh
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    parity=("$venv/bin/python" scripts/parity/parity.py)
    "${parity[@]}" reference "$work" "${torch_parts[@]}"
    cargo run --quiet --package baton-trainer --example parity -- "$work"
    BATON_BIN=$(realpath "$programs") "${parity[@]}" compare "$work"
fi

if [ "$package" = yes ]; then
    scripts/parity/setup.sh
    "$venv/bin/python" -m mypy --config-file python/pyproject.toml python/baton
    BATON_BIN=$(realpath "$programs") "$venv/bin/python" -m pytest --quiet python/tests
fi

if [ "$ffcv" = yes ]; then
    scripts/ffcv/setup.sh
    .venv-ffcv/bin/python scripts/parity/ffcv_write.py "$programs/baton"
fi
