#!/usr/bin/env bash
# Thousands of made-up workers over real gRPC on loopback, with the coordinator on one core.
#
#   scripts/bench-control/run.sh [--rounds N]     N runs of each part and side, alternating (5 without it)
#
#   --seconds S         how long heartbeats are measured in each run (20 without it)
#   --workers N         of the heartbeats (10000 without it); a process must be allowed to open as many files
#   --baton PROGRAM     another build, its coordinator beside it
#
# Besides the coordinator, torchft's lighthouse gets the same heartbeats if its package can be had from PyPI; of it
# only the compiled lighthouse is loaded, not PyTorch. The last line of output is "RESULT {...}". Expects built
# programs and the example `swarm`, as `make bench-control` sees to.
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
        say "it cannot be had here ($(tail -n 1 "$torchft.log")); its side is left out"
    fi
    rm -rf "$torchft.new" "$torchft.log"
fi
exec python3 scripts/bench-control/race.py --baton "$baton" --work "target/$bench" --rounds "$rounds" \
    --torchft "$torchft" "${others[@]}"
