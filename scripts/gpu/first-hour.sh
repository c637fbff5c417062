#!/usr/bin/env bash
# What to measure first on a GPU machine whose time is short: parts with a time limit each, the most informative
# first. Requires the programs and PyTorch, but not Rust.
#
#   scripts/gpu/first-hour.sh FOLDER-OF-PROGRAMS RESULTS [PART...]    default: all parts, in order
#
# A part that has a result in RESULTS is not run again. PYTHON names the interpreter that has PyTorch (default:
# python3). DEVICE=cpu tests the script itself, with small sizes.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
[ $# -ge 2 ] || {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
}
programs="$(cd "$1" && pwd)"
mkdir -p "$2"
results="$(cd "$2" && pwd)"
shift 2
readonly PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda}
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

# Runs a command with the libraries of this machine's PyTorch.
with_torch() {
    if [ "$DEVICE" = cpu ]; then "$@"; else "$here/env.sh" --for "$programs/baton-worker" "$@"; fi
}

libraries() {
    [ "$DEVICE" = cpu ] || nvidia-smi
    nproc
    with_torch ldd "$programs/baton-worker"
}

check() {
    [ "$DEVICE" = cpu ] || "$here/check.sh" "$programs/baton-worker"
}

# Trains on the digits; the first argument names the run, the others are more settings.
digits() {
    local name=$1 sizes=()
    shift
    [ "$DEVICE" = cpu ] && sizes=(--set train.epochs=2 --set train.resolution=32 --set evaluation.every_epochs=1
        --set precision.compute=fp32 --set precision.fused=false)
    rm -rf "$results/$name-run" "$results/$name.events"
    (cd "$root" && with_torch "$programs/baton" up recipes/digits_cpu.toml --ranks 1 --run-dir "$results/$name-run" \
        --listen 127.0.0.1:0 --json --set "cluster.device=$DEVICE" --set precision.compute=bf16 "$@" "${sizes[@]}") |
        tee "$results/$name.events" | grep --line-buffered -v '"progress"'
}

# Kills the rank of `digits NAME` after its first checkpoint. `$$` started that job.
kill_rank() {
    until grep -q '"saved"' "$results/$1.events" 2>/dev/null; do sleep 0.2; done
    local process parent
    for process in /proc/[0-9]*; do
        tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep -q 'baton-worker rank' || continue
        parent=${process#/proc/}
        while [ "${parent:-0}" -gt 1 ] && [ "$parent" != $$ ]; do
            parent=$(sed -n 's/^PPid:\t//p' "/proc/$parent/status")
        done
        [ "$parent" != $$ ] || kill -KILL "${process#/proc/}"
    done
}

# A quiet job and one whose rank is killed in the middle end with the same state.
quiet_and_killed() {
    local name=$1
    shift
    digits "$name-quiet" "$@"
    rm -f "$results/$name-killed.events"
    kill_rank "$name-killed" >/dev/null 2>&1 &
    local killer=$!
    digits "$name-killed" "$@"
    kill "$killer" 2>/dev/null || true
    grep -q '"recovered"' "$results/$name-killed.events"
    "$programs/baton" checkpoint diff "$results/$name-quiet-run/checkpoints" "$results/$name-killed-run/checkpoints"
}

job() {
    quiet_and_killed job --set precision.fused=true
}

# A vision transformer, as a program that PyTorch exports.
program() {
    BATON_BIN=$programs PYTHONPATH=$root/python with_torch "$PYTHON" "$root/recipes/programs/vit.py" "$results/vit.pt2"
    quiet_and_killed program --set model.arch=program --set "model.program=$results/vit.pt2" --set train.resolution=32 \
        --set model.channels_last=false --set model.zero_init_gamma=false --set train.epochs=4
}

# Language models of made-up weights, and PEFT.
language() {
    local sizes=()
    [ "$DEVICE" = cpu ] && sizes=(--small --batch 16 --only lora --limit 300)
    rm -rf "$results/language-work"
    with_torch "$PYTHON" "$here/language.py" --programs "$programs" --work "$results/language-work" \
        --device "$DEVICE" "${sizes[@]}"
}

# The duration of every kernel of about a step: each of the eight launches more than 500.
kernels() {
    local counters=gpu__time_duration.sum,dram__bytes.sum
    with_torch ncu --clock-control none --metrics "$counters" --csv --launch-skip 2600 --launch-count 600 \
        "$programs/baton-worker" bench --device cuda --arch resnet50 --resolution 224 --batch 256 --warm-up 4 --steps 4 \
        --set precision.compute=bf16 --set precision.fused=true >"$results/kernels.csv"
    "$PYTHON" "$here/kernels.py" "$results/kernels.csv"
}

determinism() {
    local sizes=()
    [ "$DEVICE" = cpu ] && sizes=(--arch resnet18 --side 64 --batch 2 --repeats 1)
    "$PYTHON" "$here/torch_determinism.py" --device "$DEVICE" "${sizes[@]}"
}

race() {
    local sizes=(--sides 224)
    [ "$DEVICE" = cpu ] && sizes=(--device cpu --arch resnet18 --sides 64 --batch 4 --steps 3 --compute fp32)
    "$here/bench.sh" "$programs/baton-worker" --rounds 1 "${sizes[@]}"
}

# The part, and its limit in seconds.
readonly PARTS=(libraries:30 check:220 job:90 program:60 determinism:120 race:360 language:400 kernels:180)

run() {
    local part=${1%%:*} limit=${1##*:} start=$SECONDS status=0
    if [ -e "$results/$part.ok" ]; then
        echo "== $part: has a result" >&2
        return
    fi
    [ "$DEVICE" != cpu ] || limit=$((4 * limit))
    echo "== $part: at most $limit s" >&2
    export here root programs results PYTHON DEVICE
    # shellcheck disable=SC2163  # the name of a function
    export -f with_torch digits kill_rank quiet_and_killed "$part"
    timeout --kill-after 5 "$limit" bash -euo pipefail -c "$part" 2>&1 | tee "$results/$part.log" || status=$?
    echo "== $part: status $status after $((SECONDS - start)) s" >&2
    [ $status != 0 ] || touch "$results/$part.ok"
}

for part in "${PARTS[@]}"; do
    [ $# != 0 ] && [[ " $* " != *" ${part%%:*} "* ]] && continue
    run "$part"
done
