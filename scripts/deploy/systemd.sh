#!/usr/bin/env bash
# Checks the systemd units: that systemd accepts them, their exposure level, that ranks may save, and that their flags
# and exit codes match the programs.
#
#   scripts/deploy/systemd.sh [PROGRAMS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

programs=$(realpath "${1:-target/debug}")
# Maximum level of `systemd-analyze security`, in tenths: 0 is closed, 100 open. An agent needs devices, and compiles at
# run time.
readonly MAX_COORDINATOR_EXPOSURE=20
readonly MAX_AGENT_EXPOSURE=45

fail() {
    printf 'systemd: %s\n' "$*" >&2
    exit 1
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# The programs must exist at the unit's paths, so a copy has their paths on this machine.
for unit in deploy/systemd/*.service deploy/aws/node/units/*.service deploy/aws/node/units/*.timer; do
    sed "s#/opt/baton/bin#$programs#g; s#^User=baton#User=daemon#" "$unit" >"$folder/${unit##*/}"
done
for unit in baton-coordinator baton-agent; do
    mkdir "$folder/$unit.service.d"
    cp deploy/aws/node/units/aws.conf "$folder/$unit.service.d/"
done
verify() {
    SYSTEMD_UNIT_PATH="$folder:" systemd-analyze verify "$folder"/baton-{coordinator,agent,report}.service \
        "$folder/baton-report.timer" "$folder/baton-ended@baton-agent.service" 2>&1
}
# Ignores messages about other units of this machine and about manual pages that are not installed. Some messages name
# the file, others the unit.
complaints() { grep -E "^($folder/|baton-[a-z@.-]+:|Failed )" | grep -v 'Documentation' || true; }
found=$(verify | complaints)
[ -z "$found" ] || fail "systemd complains: $found"
sed -i "s#^ExecStart=$programs/#&not-#" "$folder/baton-agent.service"
[ -n "$(verify | complaints)" ] || fail "a unit with a missing program was not detected: this check does not work"
echo "systemd: accepts all units, also with the settings on EC2"

exposure() {
    systemd-analyze security --offline=true "deploy/systemd/$1.service" --no-pager |
        sed -nE 's/.*Overall exposure level for [^:]*: ([0-9]+)\.([0-9]).*/\1\2/p'
}
check_exposure() {
    local found
    found=$(exposure "$1")
    [ -n "$found" ] || fail "systemd-analyze shows no level for $1"
    [ "$found" -le "$2" ] || fail "$1 has exposure level $found; at most $2 is allowed (in tenths)"
    echo "systemd: $1 has exposure level ${found%?}.${found: -1}"
}
check_exposure baton-coordinator $MAX_COORDINATOR_EXPOSURE
check_exposure baton-agent $MAX_AGENT_EXPOSURE

# Every flag of a unit is one of its program.
for unit in coordinator:serve agent:agent; do
    name=${unit%%:*}
    program=$([ "$name" = agent ] && echo baton-worker || echo baton-coordinator)
    help=$("$programs/$program" "${unit##*:}" --help)
    mapfile -t flags < <(sed -nE 's/^ExecStart=//p' "deploy/systemd/baton-$name.service" | grep -oE -- '--[a-z-]+')
    [ ${#flags[@]} -gt 0 ] || fail "baton-$name.service starts its program without a flag: this check does not work"
    for flag in "${flags[@]}"; do
        grep -qE -- "(^|[ ,])$flag( |$)" <<<"$help" || fail "baton-$name.service uses $flag, which is not a flag of $program"
    done
done

# Without `checkpoint.dir`, ranks save in the coordinator's run folder, where the agent's unit must let them write. The
# coordinator's unit must have created this folder before the agent starts.
run_dir=$(sed -nE 's/^ExecStart=.* --run-dir ([^ ]+).*/\1/p' deploy/systemd/baton-coordinator.service)
store=${run_dir#/var/lib/}/checkpoints
grep -qE "^StateDirectory=(.* )?$store( |\$)" deploy/systemd/baton-coordinator.service ||
    fail "baton-coordinator.service must create /var/lib/$store with StateDirectory"
grep -qE "^ReadWritePaths=(.* )?-/var/lib/$store( |\$)" deploy/systemd/baton-agent.service ||
    fail "baton-agent.service must have ReadWritePaths=-/var/lib/$store"
grep -qE '^After=(.* )?baton-coordinator\.service( |$)' deploy/systemd/baton-agent.service ||
    fail "baton-agent.service must start after baton-coordinator.service"
echo "systemd: ranks may save in the default folder"

# Exit codes by name, from their definition.
code() { sed -nE "s/^pub const $1: u8 = ([0-9]+);.*/\1/p" crates/job/src/exit.rs; }
done_codes="$(code DRAINED) $(code STOPPED) $(code LIMIT_REACHED)"
for unit in deploy/systemd/*.service; do
    grep -qx "SuccessExitStatus=$done_codes" "$unit" || fail "${unit##*/} must have SuccessExitStatus=$done_codes"
    grep -qx "RestartPreventExitStatus=$(code BAD_INPUT)" "$unit" || fail "${unit##*/} must not restart after exit code $(code BAD_INPUT)"
    stop=$(sed -nE 's/^TimeoutStopSec=([0-9]+)$/\1/p' "$unit")
    [ "$stop" -ge 100 ] && [ "$stop" -lt 120 ] || fail "${unit##*/}: TimeoutStopSec=$stop must be 100 to 119 s, to save within a spot notice of 120 s"
done
echo "systemd: flags, exit codes and stop timeouts match the programs"
