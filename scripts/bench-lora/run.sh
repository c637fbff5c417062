#!/usr/bin/env bash
# Compares fine-tuning with LoRA with PEFT and transformers on this machine's CPU, fifteen minutes a round, or GPU.
#
#   scripts/bench-lora/run.sh [--rounds N]     N runs of each side, alternating (default: 3)
#       --baton PROGRAM     another build, with coordinator and worker in the same folder
#       --device cuda       one rank on one GPU in bf16, and its memory; needs a libtorch with CUDA (BATON_CUDA=1 make
#                           setup) and, as PYTHON, a Python with torch 2.11 for CUDA, transformers, peft and bitsandbytes
#
# SmolLM2-135M-Instruct, rank 16 on all linear layers, AdamW, two CPU ranks with one thread each, 8 texts per rank and step,
# the same texts on both sides. It measures the time of a step, the memory of a rank, both with the model in 4 bits too,
# useful tokens per second of texts of every length, packed and padded, the time from `kill -9` of a rank until the next
# finished step, and the time to find the middle of an epoch of a million texts. Files are in target/bench-lora and are
# removed at the end; after a failure they are kept. The last line of output is "RESULT {...}". Requires built programs,
# which `make bench-lora` builds.
set -euo pipefail

# shellcheck source=scripts/bench/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../bench/lib.sh"

rounds=3
read_arguments "$@"
scripts/lora/prepare.sh
case " ${others[*]} " in
*" cuda "*)
    exec "${PYTHON:-python3}" scripts/bench-lora/race.py \
        --baton "$baton" --work target/bench-lora --rounds "$rounds" "${others[@]}"
    ;;
esac
race
