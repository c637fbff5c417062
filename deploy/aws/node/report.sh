#!/usr/bin/env bash
# Copies status and log of this machine to the bucket, for `baton aws status` and `baton aws logs`, also when the
# machine is gone. A timer runs it, and ended.sh a last time.
# shellcheck source-path=SCRIPTDIR disable=SC2153 # names in capitals are from node.env
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./lib.sh
read_node

# Enough to show the cause of a failure. The machine has the complete log.
readonly LINES=5000
report=$(mktemp -d)
trap 'rm -r "$report"' EXIT
journalctl --boot --no-hostname --output short-iso --lines $LINES \
    --unit 'baton-*' --unit cloud-final >"$report/log.txt"

if [ "$ROLE" != node ]; then
    export BATON_COORDINATOR=http://127.0.0.1:29600
    if [ "$ROLE" = coordinator ]; then
        export BATON_COORDINATOR=https://127.0.0.1:29600
        export BATON_TLS_CA=/etc/baton/certs/ca.pem BATON_TOKEN_FILE=/etc/baton/certs/viewer.token
    fi
    # Not available before the first start or after the end: the last uploaded status is kept.
    # In files, as for thousands of ranks it is longer than an argument may be.
    status=$(mktemp -d)
    trap 'rm -r "$report" "$status"' EXIT
    if "$HOME_OF_BATON/bin/baton" status --json >"$status/status" 2>/dev/null &&
        "$HOME_OF_BATON/bin/baton" status >"$status/words" 2>/dev/null; then
        python3 -c 'import json, sys, time; print(json.dumps(
            {"time": int(time.time()), "text": open(sys.argv[1]).read(), "status": json.load(open(sys.argv[2]))}))' \
            "$status/words" "$status/status" >"$report/status.json"
    fi
fi
aws s3 cp --only-show-errors --recursive "$report" "s3://$BUCKET/$JOB/machines/$INSTANCE/"
