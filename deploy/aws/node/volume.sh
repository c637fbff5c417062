# shellcheck shell=bash disable=SC2153
# The job's EBS volume: attached to this machine, and mounted at /data.

readonly DATA=/data

# mount_volume VOLUME-ID
mount_volume() {
    local volume=$1 device
    mkdir -p "$DATA"
    if ! mountpoint -q "$DATA"; then
        attach "$volume"
        retry 120 device_of "$volume" >/dev/null || fail "$volume is attached, but no disk appeared within two minutes"
        device=$(device_of "$volume")
        # A new volume has no file system. A volume with any data is never formatted.
        if ! blkid -p "$device" >/dev/null; then
            is_blank "$device" || fail "$device ($volume) has data, but no file system that Linux knows: it is not changed"
            say "$volume is new: creating a file system"
            mkfs.ext4 -q -L baton -m 0 "$device"
        fi
        mount -o noatime "$device" "$DATA" || fail "$device ($volume) cannot be mounted: it needs a file system without partitions"
    fi
    # In case the volume has been enlarged.
    resize2fs "$(findmnt -n -o SOURCE "$DATA")" >/dev/null 2>&1 || true
    # Journal and logs are also kept on the volume.
    mkdir -p "$DATA/.baton/state" "$DATA/checkpoints"
    chown baton:baton "$DATA/checkpoints"
    mountpoint -q "$STATE" || mount --bind "$DATA/.baton/state" "$STATE"
}

# The machine that used the volume before may still be shutting down: retry for ten minutes.
attach() {
    local volume=$1 holder
    retry 600 is_attached_here "$volume" || {
        holder=$(aws ec2 describe-volumes --volume-ids "$volume" --output text --query 'Volumes[0].Attachments[0].InstanceId')
        fail "$volume cannot be attached: another machine has it ($holder), or it is not in this zone"
    }
}

is_attached_here() {
    local volume=$1 state
    state=$(aws ec2 describe-volumes --volume-ids "$volume" --output text \
        --query "Volumes[0].[State,Attachments[?InstanceId=='$INSTANCE'].State|[0]]") || return
    case $state in
    *attached) return 0 ;;
    # The name on the machine may differ; the name here only has to be free.
    available*) aws ec2 attach-volume --volume-id "$volume" --instance-id "$INSTANCE" --device /dev/sdf >/dev/null && return 1 ;;
    esac
    return 1
}

# device_of VOLUME-ID: /dev/nvme1n1 and the like. On Nitro machines the order of NVMe disks changes from start to
# start, but the serial number of each is its volume's id; on older machines (p3) the name given when attaching is used.
device_of() {
    local serial=${1/-/} disk
    for disk in "$SYS_BLOCK"/nvme*; do
        if [ "$(trimmed "$disk/device/serial")" = "$serial" ]; then
            echo "/dev/${disk##*/}"
            return 0
        fi
    done
    for disk in /dev/xvdf /dev/sdf; do
        if [ -b "$disk" ]; then
            echo "$disk"
            return 0
        fi
    done
    return 1
}

# Whether the first MiB is all zeros, as on a new volume.
is_blank() { cmp -s -n 1048576 "$1" /dev/zero; }
