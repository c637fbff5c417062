#!/usr/bin/env bash
# Races Baton's loader against the real ffcv on this machine; about a quarter of an hour.
#
#   scripts/bench-loader/run.sh [--rounds N]     N runs of each side, alternating (5 without it)
#
# Each run is a new process. For the ratios each side has one worker thread, and all of the process is
# pinned to one core. What each run printed stays in target/bench-loader/results/. The last line of
# output is "RESULT {...}". Expects a built `baton`, as `make bench-loader` sees to.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly BATON="${CARGO_TARGET_DIR:-target}/debug/baton"
readonly PYTHON=.venv-ffcv/bin/python
readonly DATA=target/bench-loader
readonly RESULTS=$DATA/results
# Epochs that count in a run. Raw ones last less than a second.
readonly JPEG_EPOCHS=3
readonly RAW_EPOCHS=10
# Both sides run these first, uncounted; ffcv_side.py adds its own and says why.
readonly WARM_UP_EPOCHS=2

say() { printf 'bench-loader: %s\n' "$*" >&2; }
fail() {
    printf 'bench-loader: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '              %s\n' "$line" >&2; done
    exit 1
}

main() {
    local rounds=5
    while [ $# -gt 0 ]; do
        case "$1" in
        --rounds)
            rounds=${2:-}
            shift
            ;;
        -h | --help)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
            return
            ;;
        *) fail "unknown argument '$1'" "known: --rounds N, --help" ;;
        esac
        shift || true
    done
    [[ $rounds =~ ^[1-9][0-9]*$ ]] || fail "--rounds is '$rounds'; it must be a number from 1"
    [ -x "$BATON" ] || fail "$BATON is not there" "run: make build"
    command -v taskset >/dev/null || fail "taskset is missing" "run: apt-get install util-linux"

    scripts/ffcv/setup.sh
    "$PYTHON" scripts/bench-loader/make_data.py "$DATA" >&2
    rm -rf "$RESULTS"
    mkdir -p "$RESULTS"

    cut -d ' ' -f 1 /proc/loadavg >"$RESULTS/load_before"
    local round
    for ((round = 1; round <= rounds; round++)); do
        say "round $round of $rounds"
        images_per_core_second "$round"
        scaling "$round"
        epoch_start "$round"
    done
    say "memory, over one epoch and over two of 100,000 samples"
    memory
    cut -d ' ' -f 1 /proc/loadavg >"$RESULTS/load_after"

    "$PYTHON" scripts/bench-loader/summary.py "$RESULTS" \
        --rounds "$rounds" --warm-up "$WARM_UP_EPOCHS"
}

# --- What is measured --------------------------------------------------------------------------

# One thread each, and the whole process on one core: ffcv also runs a Python thread beside its
# worker, and here neither side can use a second core for anything.
images_per_core_second() {
    local round=$1
    local jpeg=$((WARM_UP_EPOCHS + JPEG_EPOCHS)) raw=$((WARM_UP_EPOCHS + RAW_EPOCHS))
    # The last core that this process may use: the first one serves most interrupts.
    local core
    core=$("$PYTHON" -c 'import os; print(max(os.sched_getaffinity(0)))')
    local pin=(taskset --cpu-list "$core")

    ffcv "jpeg-ffcv-$round" jpeg --epochs "$JPEG_EPOCHS"
    baton "jpeg-fast-$round" jpeg --epochs "$jpeg" --threads 1 --resize fast
    baton "jpeg-area-$round" jpeg --epochs "$jpeg" --threads 1 --resize area
    ffcv "raw-ffcv-$round" raw --epochs "$RAW_EPOCHS"
    baton "raw-fast-$round" raw --epochs "$raw" --threads 1 --resize fast
}

# Baton alone, not pinned.
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

# Baton alone. A loader that leaks, or whose memory grows with the samples seen, has more after two.
memory() {
    local pin=()
    baton memory-1 many --epochs 1 --threads 1 --resize fast
    baton memory-2 many --epochs 2 --threads 1 --resize fast
}

# --- One run -----------------------------------------------------------------------------------

# ffcv|baton RESULT_NAME FILE OPTION...; the caller's `pin` goes before the command.
ffcv() {
    measure "$1" "$PYTHON" scripts/bench-loader/ffcv_side.py --file "$DATA/$2.beton" --workers 1 \
        --resolution 160 --batch 256 --order random "${@:3}"
}

baton() {
    measure "$1" "$BATON" data bench "$DATA/$2.beton" \
        --resolution 160 --batch 256 --order random --json "${@:3}"
}

measure() {
    local output=$RESULTS/$1
    shift
    local result=0
    "${pin[@]}" "$@" >"$output.json" 2>"$output.log" || result=$?
    if [ $result -ne 0 ]; then
        tail -n 15 "$output.log" >&2
        fail "a side failed with status $result (the end of $output.log is above)" "it was: ${pin[*]} $*"
    fi
}

main "$@"
