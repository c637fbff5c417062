#!/usr/bin/env bash
# Races Baton's checkpoints against torch.distributed.checkpoint on this machine; some ten minutes.
#
#   scripts/bench-checkpoint/run.sh [--rounds N]     N runs of each side, alternating (3 without it)
#       --baton PROGRAM     another build, its coordinator and worker beside it
#
# ResNet-50 with momentum and a moving average of the weights, two CPU ranks: how long training stands still
# for a save, how long until it is durable and committed, how long a restore takes with as many ranks and with
# one, how long from a signal to the last commit, and what saves cost the digits run in all. Files lie in
# target/bench-checkpoint and go in the end; after a failure they stay. The last line of output is
# "RESULT {...}". Expects built programs, as `make bench-checkpoint` sees to.
set -euo pipefail

# shellcheck source=scripts/bench/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../bench/lib.sh"

rounds=3
read_arguments "$@"
race
