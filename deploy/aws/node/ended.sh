#!/usr/bin/env bash
# A service of this machine ended, or its start failed: what becomes of the machine and its group.
#
#   ended.sh baton-boot|baton-coordinator|baton-agent
#
# Nobody should pay for a machine that idles, nor for one after the other that fails; and a machine that is taken
# away must not take the group with it.
# shellcheck source-path=SCRIPTDIR disable=SC2153 # names in capitals are from node.env
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./lib.sh
read_node

main() {
    local who=${1#baton-} result=failed code=1 going what
    # Where nothing is written, it failed in a way that nobody foresaw.
    if [ "$who" != boot ]; then read -r result code <"/run/$1.ended" || true; fi
    # Some versions of systemd say so too when they are about to start it again.
    case $(systemctl show --value --property ActiveState "baton-$who") in
    active | activating | reloading) return ;;
    esac
    going=$(reason_to_go)
    what=$(decide "$ROLE" "$who" "$code" "$going")
    say "$who ended ($result, exit code $code)${going:+; this machine goes: $going}: $what"
    # Both services of one machine end together; the slower one still writes.
    if [ "$who:$ROLE" = coordinator:single ]; then
        retry 110 service_is_over baton-agent || true
    fi
    # What stopped the start has been told by it.
    if [ "$who" != boot ]; then stage "$(in_words "$who" "$code" "$what")"; fi
    bash ./report.sh || say "the last report failed"
    case $what in
    let-go) let_go ;;
    scale-in) scale_in ;;
    drop) drop ;;
    stay) ;;
    esac
}

# decide ROLE WHO CODE GOING: pure. What it prints:
#   let-go    the machine is taken away; the group starts another one, which goes on
#   scale-in  the job is over, or cannot go on: no machines any more
#   drop      this machine is no good: the others go on without it
#   stay      the end of the coordinator decides
decide() {
    local role=$1 who=$2 code=$3 going=$4
    if [ -n "$going" ]; then
        echo let-go
        return
    fi
    case $role:$who:$code in
    *:agent:0 | *:agent:3 | *:agent:4 | *:agent:75) echo stay ;;
    node:*) echo drop ;;
    # Of a machine that has both, the coordinator would wait for ever for an agent that cannot run.
    *) echo scale-in ;;
    esac
}

in_words() {
    local who=$1 code=$2 what=$3
    case $what:$code in
    let-go:*) echo "saved; the machine is taken away, and another one goes on" ;;
    *:0) echo "completed" ;;
    *:2) echo "bad input, diverging training or a store taken over (exit code 2): see the log" ;;
    *:3) echo "stopped without a save" ;;
    *:4) echo "a budget is used up; state is saved" ;;
    *:75) echo "drained; state is saved, and the same command goes on" ;;
    *) echo "the $who failed (exit code $code): see the log" ;;
    esac
}

# Why this machine is about to go, if it is: EC2 takes it back, or its group ends it.
reason_to_go() {
    local state
    if metadata meta-data/spot/instance-action >/dev/null; then
        echo "a spot interruption"
        return
    fi
    state=$(metadata meta-data/autoscaling/target-lifecycle-state) || return 0
    case $state in
    Terminated) echo "its group ends it" ;;
    esac
}

# The group waits until the hook's time is over or somebody says that all is saved.
let_go() { complete_hook || say "nothing waits for this machine to save"; }

complete_hook() {
    aws autoscaling complete-lifecycle-action --auto-scaling-group-name "baton-$JOB" --lifecycle-hook-name drain \
        --instance-id "$INSTANCE" --lifecycle-action-result CONTINUE 2>/dev/null
}

scale_in() {
    # A job that another machine may have is not ended here.
    if [ "$ROLE" = single ] && { ! retry 300 ask_for_others || [ -n "$OTHERS" ]; }; then
        say "${OTHERS:-nobody knows who} has taken the job: the group stays"
        return
    fi
    retry 600 aws autoscaling set-desired-capacity --auto-scaling-group-name "baton-$JOB" --desired-capacity 0
    if [ "$ROLE" = coordinator ]; then
        # It is no member of the group. Stopped, it costs its disk; `baton aws up` starts it again.
        shutdown -h +1 "the job is over"
    else
        # Two minutes less to pay for.
        retry 60 complete_hook || true
    fi
}

# The group gets smaller: another machine might fail like this one, and cost as much.
drop() {
    retry 600 aws autoscaling terminate-instance-in-auto-scaling-group --instance-id "$INSTANCE" \
        --should-decrement-desired-capacity
    retry 60 complete_hook || true
}

service_is_over() { ! systemctl is-active --quiet "$1"; }

main "$@"
