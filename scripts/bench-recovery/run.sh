#!/usr/bin/env bash
# Kills what trains, and measures until it trains again: Baton against torchrun on this machine; some 15 minutes.
#
#   scripts/bench-recovery/run.sh [--rounds N]     N runs of each part and side, alternating (5 without it)
#
#   --goodput-seconds S    how long ranks are killed in the one run of goodput (300 without it)
#   --seed N               repeats which ranks that run kills; printed
#   --only PART            rank-kill, all-kill, coordinator-kill, goodput or sigstop; may be repeated
#   --baton PROGRAM        another build, its coordinator and worker beside it
#
# ResNet-50 at 32 px, two CPU ranks with one thread each, a checkpoint every 5 steps. Files lie in
# target/bench-recovery and go in the end; after a failure they stay. The last line of output is
# "RESULT {...}". Expects built programs, as `make bench-recovery` sees to.
set -euo pipefail

# shellcheck source=scripts/bench/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../bench/lib.sh"

read_arguments "$@"
race
