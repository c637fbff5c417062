#!/usr/bin/env bash
# Kills training processes and measures the time until training continues: Baton and torchrun; about 20 minutes.
#
#   scripts/bench-recovery/run.sh [--rounds N]     N runs of each part and side, alternating (default: 5)
#
#   --goodput-seconds S    duration of the goodput run, in which ranks are killed (default: 300)
#   --seed N               seed of the ranks that the goodput run kills; printed, to repeat a run
#   --only PART            rank-kill, all-kill, coordinator-kill, coordinator-host, sigstop, notice or goodput; may be repeated
#   --baton PROGRAM        another build, with coordinator and worker in the same folder
#
# ResNet-50 at 32 px, two CPU ranks with one thread each, a checkpoint every 5 steps. Files are in
# target/bench-recovery and are removed at the end; after a failure they are kept. The last line of output is
# "RESULT {...}". Requires built programs, which `make bench-recovery` builds.
set -euo pipefail

# shellcheck source=scripts/bench/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../bench/lib.sh"

read_arguments "$@"
race
