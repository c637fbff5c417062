#!/usr/bin/env bash
# Runs a rank at an address of its own on the loopback device, as if it were alone on a machine: ranks of one address share
# memory instead.
#
#   scripts/bench-step/own_address.sh RANK RANKS PROGRAM...
set -euo pipefail
export BATON_BENCH_ADDRESS=127.0.0.$((1 + $1))
exec "${@:3}"
