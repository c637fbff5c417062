#!/usr/bin/env bash
# Thousands of simulated workers over real gRPC on loopback, with the coordinator on one core.
#
#   scripts/bench-control/run.sh [--rounds N]     N runs of each part and side, alternating (default: 5)
#
#   --seconds S         how long heartbeats are measured in each run (default: 20)
#   --workers N         workers that send heartbeats (default: 10000); a process must be allowed to open as many files
#   --baton PROGRAM     another build, with its coordinator in the same folder
#
# torchft's lighthouse gets the same heartbeats, if its package can be downloaded from PyPI; only the compiled
# lighthouse is loaded, not PyTorch. The last line of output is "RESULT {...}". Requires built programs and the example
# `swarm`, which `make bench-control` builds.
set -euo pipefail

# shellcheck source=scripts/bench/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../bench/lib.sh"

read_arguments "$@"

torchft=.venv-parity-torchft
if [ ! -d "$torchft" ]; then
    say "fetching torchft's lighthouse"
    if pip install --quiet --no-deps --target "$torchft.new" torchft-nightly 2>"$torchft.log"; then
        mv "$torchft.new" "$torchft"
    else
        say "the download failed ($(tail -n 1 "$torchft.log")); the lighthouse is skipped"
    fi
    rm -rf "$torchft.new" "$torchft.log"
fi
exec python3 scripts/bench-control/race.py --baton "$baton" --work "target/$bench" --rounds "$rounds" \
    --torchft "$torchft" "${others[@]}"
