#!/usr/bin/env bash
# Runs a command on three hosts: network namespaces on one bridge, whose lines carry at most RATE in each direction.
#
#   scripts/bench-step/hosts.sh RATE COMMAND...     e.g. 1gbit
#
# The command starts a rank on its host by `scripts/bench-step/on_host.sh RANK RANKS PROGRAM...`. Needs `ip` and `tc`
# (package iproute2) and user namespaces, or root.
set -euo pipefail
rate=$1
shift
# shellcheck disable=SC2016  # the inner shell expands them
exec unshare --user --map-root-user --net --mount -- bash -euc '
    mount -t tmpfs tmpfs /run
    ip link set lo up
    ip link add br0 mtu 9000 type bridge
    ip link set br0 up
    for host in 1 2 3; do
        ip netns add "n$host"
        # Packets of the usual size on a fast line, in bursts that the kernel can time.
        ip link add "v$host" mtu 9000 type veth peer name "e$host" mtu 9000
        ip link set "e$host" netns "n$host"
        ip link set "v$host" master br0 up
        ip -n "n$host" addr add "10.77.0.1$host/24" dev "e$host"
        ip -n "n$host" link set "e$host" up
        ip -n "n$host" link set lo up
        tc qdisc add dev "v$host" root tbf rate "$0" burst 1mb latency 100ms
        ip netns exec "n$host" tc qdisc add dev "e$host" root tbf rate "$0" burst 1mb latency 100ms
    done
    exec "$@"' "$rate" "$@"
