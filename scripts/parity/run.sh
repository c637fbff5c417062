#!/usr/bin/env bash
# Compares Baton with its peers, live:
# - ResNets and optimizers with torchvision and torch.optim, tensor by tensor; fails if one is off by
#   more than the tolerance in parity.py;
# - the data sets that `baton data write` makes with what the real ffcv reads from them.
# About 5 GB of disk for .venv-parity and .venv-ffcv, made once; a few minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=.venv-parity
requirements=scripts/parity/requirements.txt
if ! cmp --silent "$requirements" "$venv/installed.txt"; then
    echo "parity: installing torch and torchvision into $venv" >&2
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
    cp "$requirements" "$venv/installed.txt"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
parity=("$venv/bin/python" scripts/parity/parity.py)
"${parity[@]}" reference "$work"
cargo run --quiet --package baton-trainer --example parity -- "$work"
"${parity[@]}" compare "$work"

scripts/ffcv/setup.sh
.venv-ffcv/bin/python scripts/parity/ffcv_write.py "${CARGO_TARGET_DIR:-target}/debug/baton"
