#!/usr/bin/env bash
# Creates .venv-parity with PyTorch and torchvision, for parity and the benches. 4.7 GB, two minutes, once.
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
