# shellcheck shell=bash disable=SC2034,SC2154 # those who read this file use what is set here
# Shared by the scripts of a machine. They run as root, on a machine that serves only one job.

readonly HOME_OF_BATON=/opt/baton
readonly STATE=/var/lib/baton
readonly SYS_BLOCK=/sys/block
readonly NODE_ENV=/etc/baton/node.env
# Address of the instance metadata service. Baton's agent reads the same variable.
readonly METADATA=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}

say() { printf 'baton: %s\n' "$*"; }

# The reason of a failure, for the caller's report.
REASON=

fail() {
    REASON=$*
    say "$*" >&2
    exit 1
}

# retry SECONDS COMMAND...: repeats a command until it succeeds, for that long. AWS needs a while until new rights and
# new machines are effective.
retry() {
    local deadline=$((SECONDS + $1)) pause=1
    shift
    until "$@"; do
        [ $SECONDS -lt $deadline ] || return 1
        sleep $pause
        pause=$((pause < 3 ? pause + 1 : 3))
    done
}

# metadata PATH: prints an entry of the instance metadata; fails if there is none.
metadata() {
    local token
    token=$(curl -sf -m 5 --retry 3 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "$METADATA/latest/api/token") || return
    curl -sf -m 5 -H "X-aws-ec2-metadata-token: $token" "$METADATA/latest/$1"
}

# Reads the variables that boot.sh has written: REGION BUCKET JOB ROLE VOLUME COORDINATOR, and the machine's own
# INSTANCE.
read_node() {
    local name value
    while IFS='=' read -r name value; do
        printf -v "$name" '%s' "$value"
    done <"$NODE_ENV"
    export AWS_DEFAULT_REGION=$REGION AWS_REGION=$REGION
}

# put NAME: stores standard input in the bucket, in this machine's folder.
put() { aws s3 cp --only-show-errors - "s3://$BUCKET/$JOB/machines/$INSTANCE/$1"; }

# stage TEXT: reports what the machine is doing, for `baton aws status`. An error here is not fatal.
stage() {
    say "$*"
    python3 -c 'import json, sys, time; print(json.dumps({"time": int(time.time()), "stage": sys.argv[1]}))' "$*" |
        put stage.json || say "stage.json cannot be written to the bucket"
}

# trimmed FILE: prints a file of the kernel, which pads names with blanks.
trimmed() { sed 's/^ *//; s/ *$//' "$1" 2>/dev/null; }

# Sets OTHERS: the other machines of the group that have not ended yet. Fails if they cannot be listed.
OTHERS=
ask_for_others() {
    OTHERS=$(aws autoscaling describe-auto-scaling-groups --auto-scaling-group-names "baton-$JOB" --output text \
        --query "AutoScalingGroups[0].Instances[?InstanceId!='$INSTANCE' && LifecycleState!='Terminated'].InstanceId") || return
    [ "$OTHERS" != None ] || OTHERS=
}
