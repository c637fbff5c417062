# shellcheck shell=bash disable=SC2153
# The machine's local NVMe disks (instance store), for copies of data in buckets. They are lost with the machine.

readonly CACHE=$STATE/cache
# Amazon's deep learning images combine these disks themselves, and mount them here.
readonly MOUNTED_BY_IMAGE=/opt/dlami/nvme

mount_cache() {
    mkdir -p "$CACHE"
    if mountpoint -q "$CACHE"; then
        return
    fi
    local disks=()
    if mountpoint -q "$MOUNTED_BY_IMAGE"; then
        say "the cache is in $MOUNTED_BY_IMAGE"
        mkdir -p "$MOUNTED_BY_IMAGE/baton"
        mount --bind "$MOUNTED_BY_IMAGE/baton" "$CACHE"
    else
        mapfile -t disks < <(instance_store)
        case ${#disks[@]} in
        0) say "no instance store: the cache is on the system disk" ;;
        *)
            format_cache "${disks[@]}"
            mount -o noatime,discard "$(cache_device "${disks[@]}")" "$CACHE"
            ;;
        esac
    fi
    chown baton:baton "$CACHE"
}

# format_cache DISK...: one file system over all of them; RAID-0, as all data are copies.
format_cache() {
    say "the cache is on $# instance store disk(s)"
    if [ $# -gt 1 ]; then
        mdadm --create /dev/md0 --run --force --level=0 --raid-devices=$# "$@"
    fi
    mkfs.ext4 -q -F -L cache -m 0 -E nodiscard "$(cache_device "$@")"
}

cache_device() { if [ $# -gt 1 ]; then echo /dev/md0; else echo "$1"; fi; }

# Prints the unused disks of the instance store: no partition, no holder, not mounted.
instance_store() {
    local disk name
    for disk in "$SYS_BLOCK"/nvme*; do
        name=${disk##*/}
        [ "$(trimmed "$disk/device/model")" = "Amazon EC2 NVMe Instance Storage" ] || continue
        if compgen -G "$disk/$name"p* >/dev/null || compgen -G "$disk/holders/*" >/dev/null; then continue; fi
        if findmnt -n -S "/dev/$name" >/dev/null; then continue; fi
        echo "/dev/$name"
    done
}
