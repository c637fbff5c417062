#!/usr/bin/env bash
# Compares Baton's checkpoints with torch.distributed.checkpoint on this machine; about ten minutes.
#
#   scripts/bench-checkpoint/run.sh [--rounds N]     N runs of each side, alternating (default: 3)
#       --baton PROGRAM     another build, with coordinator and worker in the same folder
#
# ResNet-50 with momentum and a moving average of the weights, two CPU ranks. It measures how long a save stops
# training, how long it takes until the save is durable and committed, how long a restore takes with two ranks and with
# one, the time from a signal to the last commit, and the total cost of saves in the digits run. Files are in
# target/bench-checkpoint and are removed at the end; after a failure they are kept. The last line of output is
# "RESULT {...}". Requires built programs, which `make bench-checkpoint` builds.
set -euo pipefail

# shellcheck source=scripts/bench/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../bench/lib.sh"

rounds=3
read_arguments "$@"
race
