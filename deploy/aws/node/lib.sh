# shellcheck shell=bash disable=SC2034,SC2154 # those who read this file use what is set here
# What the scripts of a machine share. They run as root, on a machine that serves one job only.

readonly HOME_OF_BATON=/opt/baton
readonly STATE=/var/lib/baton
readonly SYS_BLOCK=/sys/block
readonly NODE_ENV=/etc/baton/node.env
# Where the machine asks about itself. Baton's agent knows the variable too.
readonly METADATA=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}

say() { printf 'baton: %s\n' "$*"; }

# Why the script ends before its end; for whoever tells it.
REASON=

fail() {
    REASON=$*
    say "$*" >&2
    exit 1
}

# retry SECONDS COMMAND...: until it succeeds, for that long. New rights and new machines take a while to be known.
retry() {
    local deadline=$((SECONDS + $1)) pause=1
    shift
    until "$@"; do
        [ $SECONDS -lt $deadline ] || return 1
        sleep $pause
        pause=$((pause < 3 ? pause + 1 : 3))
    done
}

# metadata PATH: what EC2 tells this machine; nothing, and failure, where there is no such thing.
metadata() {
    local token
    token=$(curl -sf -m 5 --retry 3 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "$METADATA/latest/api/token") || return
    curl -sf -m 5 -H "X-aws-ec2-metadata-token: $token" "$METADATA/latest/$1"
}

# Reads what boot.sh has written: REGION BUCKET JOB ROLE VOLUME COORDINATOR, and the machine's own INSTANCE.
read_node() {
    local name value
    while IFS='=' read -r name value; do
        printf -v "$name" '%s' "$value"
    done <"$NODE_ENV"
    export AWS_DEFAULT_REGION=$REGION AWS_REGION=$REGION
}

# put NAME: keeps standard input in the bucket, among what this machine tells of itself.
put() { aws s3 cp --only-show-errors - "s3://$BUCKET/$JOB/machines/$INSTANCE/$1"; }

# stage WORDS: what the machine is doing, for `baton aws status`. Telling is no reason to fail.
stage() {
    say "$*"
    python3 -c 'import json, sys, time; print(json.dumps({"time": int(time.time()), "stage": sys.argv[1]}))' "$*" |
        put stage.json || say "cannot tell the bucket"
}

# trimmed FILE: what the kernel says there; it fills names up with blanks.
trimmed() { sed 's/^ *//; s/ *$//' "$1" 2>/dev/null; }

# Sets OTHERS: machines of the group beside this one, which are not gone yet. Fails where the answer is not known.
OTHERS=
ask_for_others() {
    OTHERS=$(aws autoscaling describe-auto-scaling-groups --auto-scaling-group-names "baton-$JOB" --output text \
        --query "AutoScalingGroups[0].Instances[?InstanceId!='$INSTANCE' && LifecycleState!='Terminated'].InstanceId") || return
    [ "$OTHERS" != None ] || OTHERS=
}
