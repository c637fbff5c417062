#!/usr/bin/env bash
# Compares a training step of Baton with PyTorch DDP (gloo) on this machine's CPU; about 20 minutes.
#
#   scripts/bench-step/run.sh [--rounds N]     N runs of each side, alternating (default: 5)
#       --baton PROGRAM     another build, with its worker in the same folder
#
# ResNet-50, two ranks with one thread each, batch 16 per rank, synthetic images, gradients summed through shared memory, and
# over TCP; the same with and without cluster.overlap over a line so slow that the all-reduce takes a third of a step; four
# ranks on three hosts with lines as slow as that; then on one rank, in NCHW order, the native network, the same network as a program of
# torch.export, and eager PyTorch. Each run starts new processes. The output of each run is in
# target/bench-step/results/. The last line of output is "RESULT {...}". Requires built programs, which
# `make bench-step` builds.
set -euo pipefail

# shellcheck source=scripts/bench/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../bench/lib.sh"

readonly PYTHON=.venv-parity/bin/python
readonly STEPS=10
# Additions of the full recipe: clipping and a moving average of the weights.
readonly FULL=(--set train.clip_grad_norm=1.0 --set ema.decay=0.999)

main() {
    read_arguments "$@"
    refuse_others
    worker=$(dirname "$baton")/baton-worker
    need_program "$worker"

    scripts/parity/setup.sh
    begin_results
    local round side overlap rate=
    readonly PROGRAM=$results/resnet50.pt2
    "$PYTHON" scripts/bench-step/export_program.py "$PROGRAM"
    for ((round = 1; round <= rounds; round++)); do
        for side in 64 128; do
            say "round $round of $rounds, $side px"
            baton "$side-plain-baton-$round" --ranks 2 --resolution "$side"
            torch "$side-plain-torch_nhwc-$round" --ranks 2 --resolution "$side" --format nhwc
            torch "$side-plain-torch_nchw-$round" --ranks 2 --resolution "$side" --format nchw
        done
        baton "128-tcp-baton-$round" --ranks 2 --resolution 128 --launcher scripts/bench-step/own_address.sh
        say "round $round of $rounds, clipping, update and average"
        baton "64-full-baton-$round" --ranks 2 --resolution 64 "${FULL[@]}"
        for kind in foreach fused loop; do
            torch "64-full-torch_$kind-$round" --ranks 2 --resolution 64 --recipe full --optimizer "$kind"
        done
        # Two ranks send 2 x 102.4 MB of gradients in a step: in half the time of the rest.
        if [ -z "$rate" ]; then
            rate=$("$PYTHON" -c 'import json, sys
step = json.load(open(sys.argv[1]))["step_seconds"]
print(f"{2 * 102.4 * 8 / (step / 2):.0f}mbit")' "$results/64-plain-baton-1.json")
        fi
        say "round $round of $rounds, a line of $rate"
        for overlap in true false; do
            slow "$rate" "64-slow-$overlap-$round" --ranks 2 --resolution 64 --set "cluster.overlap=$overlap"
        done
        say "round $round of $rounds, three hosts with lines of $rate"
        measure "64-hosts-baton-$round" scripts/bench-step/hosts.sh "$rate" "$worker" bench --device cpu --batch 8 \
            --steps "$STEPS" --json --ranks 4 --launcher scripts/bench-step/on_host.sh --resolution 64
        measure "64-hosts-torch-$round" scripts/bench-step/hosts.sh "$rate" "$PYTHON" scripts/bench-step/torch_side.py \
            --batch 8 --steps "$STEPS" --ranks 4 --hosts 3 --resolution 64
        say "round $round of $rounds, a program on one rank"
        baton "64-alone-native-$round" --ranks 1 --resolution 64 --channels-first
        baton "64-alone-program-$round" --ranks 1 --resolution 64 --channels-first --arch program \
            --set model.program="$PROGRAM"
        torch "64-alone-torch-$round" --ranks 1 --resolution 64 --format nchw
    done
    note_load after
    "$PYTHON" scripts/bench-step/summary.py "$results" --rounds "$rounds"
}

# slow RATE RESULT_NAME OPTION...
slow() {
    measure "$2" scripts/bench-step/slow_line.sh "$1" "$worker" bench --device cpu --batch 16 --steps "$STEPS" --json \
        --launcher scripts/bench-step/own_address.sh "${@:3}"
}

# baton|torch RESULT_NAME OPTION...
baton() {
    measure "$1" "$worker" bench --device cpu --batch 16 --steps "$STEPS" --json "${@:2}"
}

torch() {
    measure "$1" "$PYTHON" scripts/bench-step/torch_side.py --batch 16 --steps "$STEPS" \
        "${@:2}"
}

main "$@"
