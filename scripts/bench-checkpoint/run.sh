#!/usr/bin/env bash
# Races Baton's checkpoints against torch.distributed.checkpoint on this machine; some fifteen minutes.
#
#   scripts/bench-checkpoint/run.sh [--rounds N]     N runs of each side, alternating (3 without it)
#
# ResNet-50 with momentum and a moving average of the weights, two CPU ranks: how long training stands still
# for a save, how long until it is durable and committed, how long a restore takes with as many ranks and with
# one, how long from a signal to the last commit, and what saves cost the digits run in all. Files lie in target/bench-checkpoint and go in the end.
# The last line of output is "RESULT {...}". Expects a built `baton`, as `make bench-checkpoint` sees to.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

case ${1:-} in
-h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
    exit
    ;;
esac

scripts/parity/setup.sh
exec .venv-parity/bin/python scripts/bench-checkpoint/race.py \
    --baton "${CARGO_TARGET_DIR:-target}/debug/baton" --work target/bench-checkpoint "$@"
