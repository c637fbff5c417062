#!/usr/bin/env bash
# Tells the bucket what this machine sees and logs: what `baton aws status` and `baton aws logs` show, also when the
# machine is gone. A timer runs it; so does ended.sh, a last time.
# shellcheck source-path=SCRIPTDIR disable=SC2153 # names in capitals are from node.env
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./lib.sh
read_node

# Enough for what led to an end. All of it is on the machine.
readonly LINES=5000
told=$(mktemp -d)
trap 'rm -r "$told"' EXIT
journalctl --boot --no-hostname --output short-iso --lines $LINES \
    --unit 'baton-*' --unit cloud-final >"$told/log.txt"

if [ "$ROLE" != node ]; then
    export BATON_COORDINATOR=http://127.0.0.1:29600
    if [ "$ROLE" = coordinator ]; then
        export BATON_COORDINATOR=https://127.0.0.1:29600
        export BATON_TLS_CA=/etc/baton/certs/ca.pem BATON_TOKEN_FILE=/etc/baton/certs/viewer.token
    fi
    # Not there before the first start nor after the end: the last one that was told stays.
    # By files: of thousands of ranks it is more than an argument may have.
    seen=$(mktemp -d)
    trap 'rm -r "$told" "$seen"' EXIT
    if "$HOME_OF_BATON/bin/baton" status --json >"$seen/status" 2>/dev/null &&
        "$HOME_OF_BATON/bin/baton" status >"$seen/words" 2>/dev/null; then
        python3 -c 'import json, sys, time; print(json.dumps(
            {"time": int(time.time()), "text": open(sys.argv[1]).read(), "status": json.load(open(sys.argv[2]))}))' \
            "$seen/words" "$seen/status" >"$told/status.json"
    fi
fi
aws s3 cp --only-show-errors --recursive "$told" "s3://$BUCKET/$JOB/machines/$INSTANCE/"
