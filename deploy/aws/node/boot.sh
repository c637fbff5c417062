#!/usr/bin/env bash
# Prepares a machine that EC2 has just started: disks, libtorch, services. Runs at every start, from user data.
#
#   boot.sh REGION=.. BUCKET=.. JOB=.. ROLE=single|coordinator|node VOLUME=vol-.. COORDINATOR=ADDRESS
#
# Each part skips what is done already. If one fails, ended.sh decides about the machine, as an idle machine costs
# money.
# shellcheck source-path=SCRIPTDIR disable=SC2153 # names in capitals are from node.env
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./lib.sh
. ./volume.sh
. ./cache.sh
. ./credentials.sh

main() {
    mkdir -p /etc/baton "$STATE"
    local instance
    instance=$(metadata meta-data/instance-id) || fail "the metadata service does not answer: is this EC2?"
    printf '%s\n' "$@" "INSTANCE=$instance" >"$NODE_ENV"
    read_node
    trap 'failed "${REASON:-$BASH_COMMAND}"' EXIT

    chmod +x "$HOME_OF_BATON"/bin/*
    "$HOME_OF_BATON/bin/baton" --version ||
        fail "Baton's programs do not run on this image: they were built on a system that is newer, or for another processor"
    id baton >/dev/null 2>&1 || useradd --system --home-dir "$STATE" --shell /usr/sbin/nologin baton
    if [ "$ROLE" = single ]; then wait_for_others; fi
    if [ -n "$VOLUME" ]; then
        stage "attaching $VOLUME"
        mount_volume "$VOLUME"
    fi
    mount_cache
    chown baton:baton "$STATE"
    install_units
    if [ "$ROLE" != coordinator ]; then
        stage "installing libtorch"
        install_libtorch
    fi
    write_environment
    if [ "$ROLE" != single ]; then
        stage "exchanging certificates"
        exchange_credentials
    fi
    start
    trap - EXIT
}

failed() {
    trap - EXIT
    stage "the start failed: $1"
    bash ./ended.sh baton-boot
    exit 1
}

# At a rebalance recommendation the group starts this machine before the other one has ended. The other one saves
# when the group ends it; with two at the same time, they would take the checkpoint store from each other.
wait_for_others() {
    local others='' deadline=$((SECONDS + 900))
    while retry 300 ask_for_others || fail "the members of the Auto Scaling group cannot be listed"; [ -n "$OTHERS" ]; do
        [ $SECONDS -lt $deadline ] || { say "$OTHERS is still in the group after 900 s: continuing without waiting"; return 0; }
        if [ "$OTHERS" != "$others" ]; then stage "waiting for $OTHERS to save and end"; fi
        others=$OTHERS
        sleep 3
    done
}

# The volume keeps libtorch for the next machine: it is 5 GB from PyPI, minutes of a machine that costs by the second.
install_libtorch() {
    local kept=/data/.baton
    if [ -n "$VOLUME" ] && [ -e "$kept/libtorch/.baton-setup" ]; then
        # At a later start it exists already, as this link or as the folder that was copied.
        rm -rf "$HOME_OF_BATON/.libtorch"
        ln -s "$kept/libtorch" "$HOME_OF_BATON/.libtorch"
    fi
    retry 600 bash "$HOME_OF_BATON/scripts/setup.sh" --libtorch
    if [ -n "$VOLUME" ] && [ ! -L "$HOME_OF_BATON/.libtorch" ]; then
        rm -rf "$kept/libtorch" "$kept/libtorch.new"
        mkdir -p "$kept"
        cp -a "$HOME_OF_BATON/.libtorch" "$kept/libtorch.new"
        mv "$kept/libtorch.new" "$kept/libtorch"
    fi
}

install_units() {
    local units=/etc/systemd/system
    install -m 644 "$HOME_OF_BATON"/systemd/*.service units/*.service units/*.timer "$units/"
    local unit
    for unit in baton-coordinator baton-agent; do
        install -D -m 644 units/aws.conf "$units/$unit.service.d/aws.conf"
    done
    systemctl daemon-reload
}

# Writes the settings that both units read. The recipe is the job's; its paths are of this machine.
write_environment() {
    install -m 644 "$HOME_OF_BATON/job.toml" /etc/baton/job.toml
    local address
    address=$(metadata meta-data/local-ipv4)
    {
        echo "RUST_LOG=info"
        echo "AWS_REGION=$REGION"
        echo "LD_LIBRARY_PATH=$HOME_OF_BATON/.libtorch/torch/lib:/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib"
        # A machine has the same name everywhere.
        case $ROLE in
        single) echo "BATON_AGENT_FLAGS=--node-id $INSTANCE" ;;
        coordinator)
            echo "BATON_LISTEN=0.0.0.0:29600"
            echo "BATON_COORDINATOR_FLAGS=--tls-cert $CERTS/coordinator.pem --tls-key $CERTS/coordinator-key.pem --tokens $CERTS/tokens"
            ;;
        node)
            echo "BATON_COORDINATOR=https://$COORDINATOR:29600"
            echo "BATON_TLS_CA=$CERTS/ca.pem"
            echo "BATON_TOKEN_FILE=$CERTS/agent.token"
            echo "BATON_AGENT_FLAGS=--node-id $INSTANCE --host $address"
            ;;
        esac
    } >/etc/baton/baton.env
}

start() {
    stage "starting"
    local services=(baton-report.timer)
    case $ROLE in
    single) services+=(baton-coordinator baton-agent) ;;
    coordinator) services+=(baton-coordinator) ;;
    node) services+=(baton-agent) ;;
    esac
    # Not enabled: at the next start this script runs again, and starts them when the disks are mounted.
    systemctl start --no-block "${services[@]}"
    say "started ${services[*]}"
}

main "$@"
