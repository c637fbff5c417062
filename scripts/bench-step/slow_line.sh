#!/usr/bin/env bash
# Runs a command whose loopback device carries at most RATE, as a line between two machines would.
#
#   scripts/bench-step/slow_line.sh RATE COMMAND...     e.g. 3gbit
#
# Needs `tc` (package iproute2) and user namespaces, or root.
set -euo pipefail
rate=$1
shift
# shellcheck disable=SC2016  # the inner shell expands them
exec unshare --user --map-root-user --net -- bash -euc '
    ip link set lo up
    # Packets of the usual size on a fast line, in bursts that the kernel can time.
    ip link set lo mtu 9000
    tc qdisc add dev lo root tbf rate "$0" burst 1mb latency 100ms
    exec "$@"' "$rate" "$@"
