#!/usr/bin/env bash
# Runs when a service of this machine has ended, or its start has failed: decides about the machine and its group.
#
#   ended.sh baton-boot|baton-coordinator|baton-agent
#
# Idle machines, and machines that fail one after the other, cost money; and a machine that is taken away must not end
# the group.
# shellcheck source-path=SCRIPTDIR disable=SC2153 # names in capitals are from node.env
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./lib.sh
read_node

main() {
    local service=${1#baton-} result=failed code=1 end_reason action
    # Without this file the service failed in an unknown way.
    if [ "$service" != boot ]; then read -r result code <"/run/$1.ended" || true; fi
    # Some versions of systemd also run this when they are about to restart the service.
    case $(systemctl show --value --property ActiveState "baton-$service") in
    active | activating | reloading) return ;;
    esac
    end_reason=$(reason_to_go)
    action=$(decide "$ROLE" "$service" "$code" "$end_reason")
    say "$service ended ($result, exit code $code)${end_reason:+; this machine ends: $end_reason}: $action"
    # Both services of one machine end together; wait for the slower one.
    if [ "$service:$ROLE" = coordinator:single ]; then
        retry 110 service_is_over baton-agent || true
    fi
    # A failed start has already been reported by boot.sh.
    if [ "$service" != boot ]; then stage "$(in_words "$service" "$code" "$action")"; fi
    bash ./report.sh || say "the last report failed"
    case $action in
    let-go) let_go ;;
    scale-in) scale_in ;;
    drop) drop ;;
    stay) ;;
    esac
}

# decide ROLE SERVICE CODE END_REASON: a pure function. Prints one of:
#   let-go    the machine is taken away; the group starts another one, which continues
#   scale-in  the job is over, or cannot continue: the group is set to 0
#   drop      this machine is faulty: the others continue without it
#   stay      the end of the coordinator decides
decide() {
    local role=$1 service=$2 code=$3 end_reason=$4
    if [ -n "$end_reason" ]; then
        echo let-go
        return
    fi
    case $role:$service:$code in
    *:agent:0 | *:agent:3 | *:agent:4 | *:agent:75) echo stay ;;
    node:*) echo drop ;;
    # On a machine with both, the coordinator would wait forever for an agent that cannot run.
    *) echo scale-in ;;
    esac
}

in_words() {
    local service=$1 code=$2 action=$3
    case $action:$code in
    let-go:*) echo "saved; the machine is taken away, and another one continues" ;;
    *:0) echo "completed" ;;
    *:2) echo "bad input, diverging training or a store taken over (exit code 2): see the log" ;;
    *:3) echo "stopped without a save" ;;
    *:4) echo "a budget is used up; state is saved" ;;
    *:75) echo "drained; state is saved, and the same command continues" ;;
    *) echo "the $service failed (exit code $code): see the log" ;;
    esac
}

# Prints why this machine will be ended, if so: a spot interruption, or by its group.
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

# The group waits until the hook's time is over or the hook is completed.
let_go() { complete_hook || say "no lifecycle hook waits for this machine"; }

complete_hook() {
    aws autoscaling complete-lifecycle-action --auto-scaling-group-name "baton-$JOB" --lifecycle-hook-name drain \
        --instance-id "$INSTANCE" --lifecycle-action-result CONTINUE 2>/dev/null
}

scale_in() {
    # The group is not set to 0 if another machine may run the job.
    if [ "$ROLE" = single ] && { ! retry 300 ask_for_others || [ -n "$OTHERS" ]; }; then
        say "${OTHERS:-another machine, perhaps,} runs the job now: the group is not changed"
        return
    fi
    retry 600 aws autoscaling set-desired-capacity --auto-scaling-group-name "baton-$JOB" --desired-capacity 0
    if [ "$ROLE" = coordinator ]; then
        # It is not a member of the group. A stopped machine costs only its disk; `baton aws up` starts it again, once it
        # is stopped. So without delay: everything is reported.
        shutdown -h now "the job is over"
    else
        # This saves two minutes of cost.
        retry 60 complete_hook || true
    fi
}

# Reduces the size of the group, as another machine might fail in the same way.
drop() {
    retry 600 aws autoscaling terminate-instance-in-auto-scaling-group --instance-id "$INSTANCE" \
        --should-decrement-desired-capacity
    retry 60 complete_hook || true
}

service_is_over() { ! systemctl is-active --quiet "$1"; }

main "$@"
