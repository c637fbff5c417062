#!/usr/bin/env bash
# Races a training step of Baton against PyTorch DDP (gloo) on this machine's CPU; some 20 minutes.
#
#   scripts/bench-step/run.sh [--rounds N]     N runs of each side, alternating (5 without it)
#
# ResNet-50, two ranks with one thread each, batch 16 per rank, made-up images, gradients added up. Each
# run is new processes. What each printed stays in target/bench-step/results/. The last line of output is
# "RESULT {...}". Expects a built `baton-worker`, as `make bench-step` sees to.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly WORKER="${CARGO_TARGET_DIR:-target}/debug/baton-worker"
readonly PYTHON=.venv-parity/bin/python
readonly RESULTS=target/bench-step/results
readonly STEPS=10
# What the full recipe adds: clipping and a moving average of the weights.
readonly FULL=(--set train.clip_grad_norm=1.0 --set ema.decay=0.999)

say() { printf 'bench-step: %s\n' "$*" >&2; }
fail() {
    printf 'bench-step: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '            %s\n' "$line" >&2; done
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
    [ -x "$WORKER" ] || fail "$WORKER is not there" "run: make build"

    scripts/parity/setup.sh
    rm -rf "$RESULTS"
    mkdir -p "$RESULTS"
    cut -d ' ' -f 1 /proc/loadavg >"$RESULTS/load_before"
    local round side
    for ((round = 1; round <= rounds; round++)); do
        for side in 64 128; do
            say "round $round of $rounds, $side px"
            baton "$side-plain-baton-$round" --resolution "$side"
            torch "$side-plain-torch_nhwc-$round" --resolution "$side" --format nhwc
            torch "$side-plain-torch_nchw-$round" --resolution "$side" --format nchw
        done
        say "round $round of $rounds, clipping, update and average"
        baton "64-full-baton-$round" --resolution 64 "${FULL[@]}"
        for kind in foreach fused loop; do
            torch "64-full-torch_$kind-$round" --resolution 64 --recipe full --optimizer "$kind"
        done
    done
    cut -d ' ' -f 1 /proc/loadavg >"$RESULTS/load_after"
    "$PYTHON" scripts/bench-step/summary.py "$RESULTS" --rounds "$rounds"
}

# baton|torch RESULT_NAME OPTION...
baton() {
    measure "$1" "$WORKER" bench --device cpu --ranks 2 --batch 16 --steps "$STEPS" --json "${@:2}"
}

torch() {
    measure "$1" "$PYTHON" scripts/bench-step/torch_side.py --ranks 2 --batch 16 --steps "$STEPS" \
        "${@:2}"
}

measure() {
    local output=$RESULTS/$1
    shift
    local result=0
    "$@" >"$output.json" 2>"$output.log" || result=$?
    if [ $result -ne 0 ]; then
        tail -n 15 "$output.log" >&2
        fail "a side failed with status $result (the end of $output.log is above)" "it was: $*"
    fi
}

main "$@"
