#!/usr/bin/env bash
# Checks all of deploy/ on one machine, without a cloud, a cluster or a container engine. Run by `make deploy-check`.
#
#   scripts/deploy/check.sh PROGRAMS [NAME...]     some of: shell aws-template aws aws-several systemd container
#                                                  kubernetes breakages slurm skypilot drive runbook
#
# Checks that wait more than they compute run in parallel. One that cannot run here prints the reason, exits with 77,
# and is counted as skipped. This is a failure for a check that every machine can run, or if no check ran at all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
case ${1:-} in
'' | -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit ;;
esac

programs=$1
shift
python=.venv-deploy/bin/python

declare -A commands=(
    [shell]="nice -n 5 scripts/check-shell.sh"
    [aws-template]="nice -n 5 .venv-deploy/bin/cfn-lint deploy/aws/baton.yaml"
    [aws]="scripts/deploy/aws.sh $programs single"
    [aws-several]="nice -n 5 scripts/deploy/aws.sh $programs several"
    [systemd]="scripts/deploy/systemd.sh $programs"
    [container]="nice -n 10 scripts/deploy/container.sh $programs"
    [kubernetes]="nice -n 5 $python scripts/deploy/kubernetes.py $programs"
    [breakages]="nice -n 10 $python scripts/deploy/kubernetes.py --self-test $programs"
    [slurm]="scripts/deploy/slurm.py $programs"
    [skypilot]="nice -n 5 $python scripts/deploy/skypilot.py $programs"
    [drive]="nice -n 5 $python scripts/deploy/drive.py $programs"
    [runbook]="nice -n 10 $python scripts/deploy/runbook.py $programs"
)
# They need root, or a kernel that lets them create namespaces or mount FUSE, which not every machine gives.
readonly may_skip=" aws aws-several container slurm skypilot drive "
# Rows run in parallel, the checks of a row one after the other. The first row takes longest and has priority.
rows=("aws" "systemd aws-template shell breakages aws-several" "slurm kubernetes skypilot drive runbook container")
if [ $# -gt 0 ]; then
    for name in "$@"; do
        [ -n "${commands[$name]:-}" ] || { echo "deploy-check: unknown check $name; known: ${!commands[*]}" >&2 && exit 2; }
    done
    rows=("$*")
fi

logs=$(mktemp -d)
# Each row is a separate process group, so that all its processes end with this script.
set -m
# shellcheck disable=SC2329 # traps call it
leave() {
    trap - EXIT INT TERM
    for row in $(jobs -p); do kill -TERM -- "-$row" 2>/dev/null || true; done
    wait
    rm -rf "$logs"
}
trap leave EXIT
trap 'leave; exit 130' INT TERM

run() {
    local name start result code
    for name in $1; do
        start=$SECONDS code=0
        ${commands[$name]} >"$logs/$name.log" 2>&1 || code=$?
        result=FAILED
        case $code in
        0) result=ok ;;
        77)
            if [[ $may_skip != *" $name "* ]]; then
                echo "$name may not be skipped: every machine can run it" >>"$logs/$name.log"
            elif [ ! -s "$logs/$name.log" ]; then
                echo "$name was skipped without a reason" >>"$logs/$name.log"
            else
                result="skipped: $(head -n 1 "$logs/$name.log")"
            fi
            ;;
        esac
        printf '%-13s %4d s  %s\n' "$name" $((SECONDS - start)) "$result" | tee "$logs/$name.${result%%:*}"
        sed 's/^/    /' "$logs/$name.log"
    done
}
for row in "${rows[@]}"; do run "$row" & done
wait

echo "=== total: $SECONDS s"
declare -A count=([ok]=0 [skipped]=0 [FAILED]=0)
read -ra names <<<"${rows[*]}"
for name in "${names[@]}"; do
    outcome=FAILED
    for found in ok skipped FAILED; do [ ! -e "$logs/$name.$found" ] || outcome=$found; done
    cat "$logs/$name.$outcome" 2>/dev/null || echo "$name did not end"
    count[$outcome]=$((count[$outcome] + 1))
done
echo "=== ${count[ok]} ok, ${count[skipped]} skipped, ${count[FAILED]} failed"
[ "${count[FAILED]}" = 0 ] || exit 1
[ "${count[ok]}" -gt 0 ] || { echo "deploy-check: every check was skipped, so nothing is known" && exit 1; }
