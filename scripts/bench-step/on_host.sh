#!/usr/bin/env bash
# Runs one of RANKS ranks on its host; hosts.sh has made three.
#
#   scripts/bench-step/on_host.sh RANK RANKS PROGRAM...
set -euo pipefail
host=$((1 + $1 * 3 / $2))
export BATON_BENCH_ADDRESS=10.77.0.1$host
exec ip netns exec "n$host" "${@:3}"
