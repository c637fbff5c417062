#!/usr/bin/env bash
# Compares Baton's loader with the real ffcv on this machine; about a quarter of an hour.
#
#   scripts/bench-loader/run.sh [--rounds N]     N runs of each side, alternating (default: 5)
#       --baton PROGRAM     another build
#
# Each run is a new process. For the ratios each side has one worker thread, and the whole process is
# pinned to one core. The output of each run is in target/bench-loader/results/. The last line of output
# is "RESULT {...}". Requires a built `baton`, which `make bench-loader` builds.
set -euo pipefail

# shellcheck source=scripts/bench/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../bench/lib.sh"

readonly PYTHON=.venv-ffcv/bin/python
readonly DATA=target/bench-loader
# Epochs that count in a run. An epoch of raw images takes less than a second.
readonly JPEG_EPOCHS=3
readonly RAW_EPOCHS=10
# Epochs before those that count; ffcv_side.py has its own, with the reason.
readonly WARM_UP_EPOCHS=2

main() {
    read_arguments "$@"
    refuse_others
    command -v taskset >/dev/null || fail "taskset is missing" "run: apt-get install util-linux"

    scripts/ffcv/setup.sh
    "$PYTHON" scripts/bench-loader/make_data.py "$DATA" >&2
    begin_results
    local round
    for ((round = 1; round <= rounds; round++)); do
        say "round $round of $rounds"
        images_per_core_second "$round"
        scaling "$round"
        epoch_start "$round"
    done
    say "memory, over one epoch and over two of 100,000 samples"
    memory
    note_load after

    "$PYTHON" scripts/bench-loader/summary.py "$results" \
        --rounds "$rounds" --warm-up "$WARM_UP_EPOCHS"
}

# --- Measurements -----------------------------------------------------------------------------

# One thread each, and the whole process on one core: ffcv also runs a Python thread, and with one core neither side can
# use a second core for anything.
images_per_core_second() {
    local round=$1
    local jpeg=$((WARM_UP_EPOCHS + JPEG_EPOCHS)) raw=$((WARM_UP_EPOCHS + RAW_EPOCHS))
    # The last core that this process may use, as the first one handles most interrupts.
    local core
    core=$("$PYTHON" -c 'import os; print(max(os.sched_getaffinity(0)))')
    local pin=(taskset --cpu-list "$core")

    ffcv "jpeg-ffcv-$round" jpeg --epochs "$JPEG_EPOCHS"
    baton "jpeg-fast-$round" jpeg --epochs "$jpeg" --threads 1 --resize fast
    baton "jpeg-area-$round" jpeg --epochs "$jpeg" --threads 1 --resize area
    ffcv "raw-ffcv-$round" raw --epochs "$RAW_EPOCHS"
    baton "raw-fast-$round" raw --epochs "$raw" --threads 1 --resize fast
}

# Only Baton, not pinned.
scaling() {
    local round=$1 pin=()
    local epochs=$((WARM_UP_EPOCHS + JPEG_EPOCHS))
    [ "$(nproc)" -ge 2 ] || return 0
    baton "scaling-1-$round" jpeg --epochs "$epochs" --threads 1 --resize fast
    baton "scaling-2-$round" jpeg --epochs "$epochs" --threads 2 --resize fast
}

# From the start of an epoch of 1.3 million samples to its first batch.
epoch_start() {
    local round=$1 pin=()
    ffcv "start-ffcv-$round" huge --epochs 3 --first-batch-only
    baton "start-baton-$round" huge --epochs 3 --batches 1 --threads 1 --resize fast
}

# Only Baton. A loader that leaks, or whose memory grows with the number of samples, has more after two epochs.
memory() {
    local pin=()
    baton memory-1 many --epochs 1 --threads 1 --resize fast
    baton memory-2 many --epochs 2 --threads 1 --resize fast
}

# --- One run ----------------------------------------------------------------------------------

# ffcv|baton RESULT_NAME FILE OPTION...; the caller's `pin` goes before the command.
ffcv() {
    measure "$1" "${pin[@]}" "$PYTHON" scripts/bench-loader/ffcv_side.py --file "$DATA/$2.beton" --workers 1 \
        --resolution 160 --batch 256 --order random "${@:3}"
}

baton() {
    measure "$1" "${pin[@]}" "$baton" data bench "$DATA/$2.beton" \
        --resolution 160 --batch 256 --order random --json "${@:3}"
}

main "$@"
