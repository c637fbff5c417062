#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct on functions of Python's standard library, on two CPU cores: about 20 minutes.
#
#   scripts/lora/run.sh [FLAG...]     flags go to `baton up`, e.g. --set train.epochs=2
#
# Prints the loss on modules that are not trained on, before and after, and how many of the functions that the model writes
# for them are valid Python; three of them at the end. Everything is in .lora/. Requires built programs,
# which `make run-lora` builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

scripts/lora/prepare.sh
programs=$(realpath "${CARGO_TARGET_DIR:-target}")/debug
recipe=$PWD/recipes/smollm2_lora_cpu.toml
# Changes of the recipe are for evaluations too.
settings=() before=
for word in "$@"; do
    if [ "$before" = --set ]; then settings+=(--set "$word"); fi
    before=$word
done
cd .lora
echo "the model itself, on modules that are not trained on:"
evaluate=("$programs/baton-worker" eval --recipe "$recipe" --data data/functions-val.beton "${settings[@]}")
"${evaluate[@]}"
"$programs/baton" up "$recipe" --ranks 2 "$@"
run=runs/smollm2_lora_cpu
"$programs/baton" checkpoint export --run-dir "$run" --out adapter.safetensors
echo "with the adapter:"
"${evaluate[@]}" --weights adapter.safetensors --show 3
echo "for PEFT: baton checkpoint export --run-dir .lora/$run --peft adapter"
