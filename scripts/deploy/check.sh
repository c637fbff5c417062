#!/usr/bin/env bash
# Checks all of deploy/ on one machine, without a cloud, a cluster or a container engine. Run by `make deploy-check`.
#
#   scripts/deploy/check.sh PROGRAMS [NAME...]     some of: aws-template aws aws-several systemd container kubernetes slurm runbook
#
# Checks that wait more than they compute run beside each other. One that cannot run here says why, and is listed so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

programs=$1
shift
python=.venv-deploy/bin/python
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

declare -A commands=(
    [aws-template]=".venv-deploy/bin/cfn-lint deploy/aws/baton.yaml"
    [aws]="scripts/deploy/aws.sh $programs single"
    [aws-several]="scripts/deploy/aws.sh $programs several"
    [systemd]="scripts/deploy/systemd.sh $programs"
    [container]="scripts/deploy/container.sh $programs"
    [kubernetes]="$python scripts/deploy/kubernetes.py $programs"
    [slurm]="scripts/deploy/slurm.py $programs"
    [runbook]="$python scripts/deploy/runbook.py $programs"
)
# Rows of checks, each one after the other, about as long as each other.
rows=("aws" "aws-template systemd aws-several container" "kubernetes slurm runbook")
if [ $# -gt 0 ]; then rows=("$*"); fi

run() {
    local name start result
    for name in $1; do
        [ -n "${commands[$name]:-}" ] || { echo "$name: there is no such check" | tee "$logs/$name.unknown" && continue; }
        start=$SECONDS result=ok
        ${commands[$name]} >"$logs/$name.log" 2>&1 || { [ $? = 77 ] && result=skipped || result=FAILED; }
        grep -q 'SKIPPED' "$logs/$name.log" && result=skipped
        printf '%-13s %4d s  %s\n' "$name" $((SECONDS - start)) "$result" | tee "$logs/$name.$result"
        sed 's/^/    /' "$logs/$name.log"
    done
}
for row in "${rows[@]}"; do run "$row" & done
wait

echo "=== in all: $SECONDS s"
cat "$logs"/*.{ok,skipped,FAILED,unknown} 2>/dev/null || true
if compgen -G "$logs/*.FAILED" >/dev/null || compgen -G "$logs/*.unknown" >/dev/null; then exit 1; fi
