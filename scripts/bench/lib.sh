# shellcheck shell=bash
# Shared by the benches' run.sh, which source this file. It changes the working directory to the repository's root.
#
# Each accepts --rounds N, --baton PROGRAM (another build, with coordinator and worker in the same folder) and --help.

script=$(realpath "$0")
bench=$(basename "$(dirname "$script")")
cd "$(dirname "$script")/../.." || exit
# Python finds the shared modules here, and writes no bytecode files.
export PYTHONPATH=scripts/bench PYTHONDONTWRITEBYTECODE=1

rounds=5
baton=${CARGO_TARGET_DIR:-target}/debug/baton
others=()
results=target/$bench/results

say() { printf '%s: %s\n' "$bench" "$*" >&2; }

# fail PROBLEM LINE...
fail() {
    say "$1"
    shift
    for line in "$@"; do printf '%*s  %s\n' ${#bench} '' "$line" >&2; done
    exit 1
}

# Sets `rounds` and `baton`; arguments of a single bench go to `others`.
read_arguments() {
    while [ $# -gt 0 ]; do
        case "$1" in
        --rounds | --baton)
            printf -v "${1#--}" %s "${2:-}"
            shift
            ;;
        -h | --help)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$script"
            exit
            ;;
        *) others+=("$1") ;;
        esac
        shift || true
    done
    [[ $rounds =~ ^[1-9][0-9]*$ ]] || fail "--rounds is '$rounds'; it must be a number of at least 1"
    need_program "$baton"
}

refuse_others() {
    [ ${#others[@]} -eq 0 ] ||
        fail "unknown argument '${others[0]}'" "known: --rounds N, --baton PROGRAM, --help"
}

need_program() {
    [[ -f $1 && -x $1 ]] || fail "no program at '$1'" "run: make build"
}

# Runs race.py of the bench, which compares with PyTorch.
race() {
    scripts/parity/setup.sh
    exec .venv-parity/bin/python "scripts/$bench/race.py" \
        --baton "$baton" --work "target/$bench" --rounds "$rounds" "${others[@]}"
}

begin_results() {
    rm -rf "$results"
    mkdir -p "$results"
    note_load before
}

note_load() { cut -d ' ' -f 1 /proc/loadavg >"$results/load_$1"; }

# measure NAME COMMAND...: stdout goes to NAME.json and stderr to NAME.log in the results folder.
measure() {
    local output=$results/$1
    shift
    "$@" >"$output.json" 2>"$output.log" && return
    local result=$?
    tail -n 15 "$output.log" >&2
    fail "a side failed with status $result (the end of $output.log is above)" "command: $*"
}
