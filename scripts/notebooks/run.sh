#!/usr/bin/env bash
# Executes the notebooks of notebooks/ on this machine's CPU.
#
#   scripts/notebooks/run.sh           all, with the PyTorch of .venv-parity; downloads a small language model, 93 MB, once
#   scripts/notebooks/run.sh NAME...   these, in .venv-notebooks, which has no PyTorch
#
# Requires built programs, which `make notebooks` builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

requirements=scripts/notebooks/requirements.txt
if [ $# -eq 0 ]; then
    set -- signals sequences spectrograms language_model p4d
    venv=.venv-parity
    scripts/parity/setup.sh
    scripts/lora/prepare.sh
else
    venv=.venv-notebooks
    [ -d "$venv" ] || "${PYTHON:-python3}" -m venv "$venv"
fi
if ! cmp --silent "$requirements" "$venv/notebooks.txt"; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
    cp "$requirements" "$venv/notebooks.txt"
fi
programs=$(realpath "${CARGO_TARGET_DIR:-target}")/debug
# Nothing of this user's own Jupyter changes the result; the port of a kernel is on this machine only.
export IPYTHONDIR=$PWD/$venv/ipython JUPYTER_PLATFORM_DIRS=1 JUPYTER_CONFIG_DIR=$PWD/$venv/jupyter
BATON_BIN=$programs PYTHONPATH=$PWD/python exec "$venv/bin/python" scripts/notebooks/run.py "$@"
