#!/usr/bin/env bash
# Adds a run of the current programs to tests/compat, which later versions must be able to continue.
#
#   scripts/compat-run.sh BIN NAME
#
# Two ranks train until they are drained in the middle of an epoch; that run folder is kept. A second run is not
# interrupted, and later versions must end with the digest of its weights. Takes half a minute.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly baton=$1/baton folder=tests/compat/$2
if [ -e "$folder" ]; then
    echo "compat-run: $folder exists already; choose another name with NAME=…" >&2
    exit 1
fi
readonly arguments=(recipes/digits_cpu.toml
    --set model.arch=linear --set "optimizer={kind='sgd',momentum=0.9}" --set train.epochs=100
    --set train.virtual_ranks=4 --set checkpoint.every_epochs=20 --set evaluation.every_epochs=20
    --set cluster.max_ranks=4)
# Well before the end, after 2,200 steps.
readonly first_step=600
readonly drained=75

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# up RUN_DIR
up() {
    "$baton" up "${arguments[@]}" --ranks 2 --listen 127.0.0.1:0 --run-dir "$1" >>"$work/log" 2>&1
}

# field FILE EXPRESSION: a value of a JSON document.
field() {
    python3 -c "import json, sys; d = json.load(open(sys.argv[1])); print($2)" "$1"
}

step_of() {
    "$baton" status --json --run-dir "$work/run" >"$work/status" 2>/dev/null &&
        field "$work/status" "(d['latest'] or {}).get('step', 0)" || echo 0
}

# The drain may happen at the end of an epoch: then the run continues for a while.
step=0 cursor=0
while [ "$cursor" = 0 ]; do
    target=$((step > first_step ? step + 1 : first_step))
    up "$work/run" &
    until [ "$(step_of)" -ge "$target" ]; do
        kill -0 $! || { cat "$work/log" >&2 && exit 1; }
        sleep 0.1
    done
    "$baton" drain --run-dir "$work/run" >/dev/null
    code=0
    wait $! || code=$?
    [ "$code" = "$drained" ] || { cat "$work/log" >&2 && exit 1; }
    # The last one in the order of names is the newest.
    for manifest in "$work"/run/checkpoints/step-*/manifest.json; do :; done
    step=$(field "$manifest" "d['step']")
    cursor=$(field "$manifest" "d['progress']['cursor']")
done

up "$work/undisturbed" || { cat "$work/log" >&2 && exit 1; }
"$baton" checkpoint export --run-dir "$work/undisturbed" --out "$work/end.safetensors" >/dev/null

mkdir -p "$folder/run"
cp -r "$work/run/checkpoints" "$work/run/journal.redb" "$work/run/metrics.jsonl" "$folder/run"
{
    echo "# Two ranks of version $2 were drained in the middle of an epoch."
    echo "arguments = ["
    printf '    "%s",\n' "${arguments[@]}"
    echo "]"
    echo "resumes_at_step = $step"
    echo "# Of the exported weights of an undisturbed run."
    echo "export_sha256 = \"$(sha256sum <"$work/end.safetensors" | cut -d' ' -f1)\""
} >"$folder/story.toml"
echo "compat-run: $folder continues at step $step; test it with \`make test ARGS=older_versions\`, then commit it"
