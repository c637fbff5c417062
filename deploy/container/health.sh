#!/bin/sh
# Health check of the Baton process in this container: exits with 0, or prints the problem in one line.
#
# A coordinator must answer `baton status`. If it requires tokens, give the container BATON_TOKEN_FILE (a viewer's) and
# BATON_TLS_CA.
# An agent must be connected to its coordinator, according to the kernel's table of connections, as an agent's token has
# no right to read the status. The coordinator's keepalive disconnects an agent that hangs within ten seconds. An agent
# without a coordinator continues training, so a failed check must not be a reason to restart it.
set -eu

runs() {
    for name in /proc/[0-9]*/comm; do
        read -r comm 2>/dev/null <"$name" || continue
        [ "$comm" != "$1" ] || return 0
    done
    return 1
}

# Lines of the table: number, local address, remote address (in hexadecimal), state (01: established), ...
connected() {
    while read -r _ _ remote state _; do
        [ "${remote##*:}:$state" != "$1:01" ] || return 0
    done
    return 1
}

if runs baton-coordinat; then # the kernel cuts names to 15 characters
    baton status >/dev/null
elif runs baton-worker; then
    coordinator=${BATON_COORDINATOR:-http://127.0.0.1:29600}
    port=$(printf '%s' "$coordinator" | sed -nE 's|.*:([0-9]+)/?$|\1|p')
    if [ -z "$port" ]; then
        echo "BATON_COORDINATOR=$coordinator names no port: http://HOST:PORT" >&2
        exit 1
    fi
    if ! cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | connected "$(printf '%04X' "$port")"; then
        echo "the agent has no connection to $coordinator" >&2
        exit 1
    fi
else
    echo "neither baton-coordinator nor baton-worker runs here" >&2
    exit 1
fi
