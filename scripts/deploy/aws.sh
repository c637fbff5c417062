#!/usr/bin/env bash
# Jobs on EC2 from launch to tear-down, against a local AWS: see aws/story.py.
#
#   scripts/deploy/aws.sh [PROGRAMS] [single|several]
#
# Machines are booted for real, in containers of systemd-nspawn: that needs root, and a kernel with namespaces, overlays
# and loop devices. Where there is none of that, this says so and ends with 77.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

programs=${1:-target/debug}
shift || true

missing=()
[ "$(id -u)" = 0 ] || missing+=("root")
for tool in systemd-nspawn unshare nsenter losetup mkfs.ext4 ip curl; do
    command -v "$tool" >/dev/null || missing+=("$tool")
done
[ -e /dev/loop-control ] || missing+=("loop devices")
unshare --net --mount true 2>/dev/null || missing+=("namespaces")
if [ ${#missing[@]} -gt 0 ]; then
    echo "aws: the machines of this test cannot be booted here; missing: ${missing[*]}" >&2
    exit 77
fi

# A network and mounts of its own, which go when it ends; its machines it ends itself. Mounts made outside later are not seen inside.
export PYTHONPATH=scripts/deploy/aws PYTHONDONTWRITEBYTECODE=1
exec unshare --net --mount --propagation private sh -c 'mount -t tmpfs tmpfs /run/netns 2>/dev/null || { mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns; }; exec "$@"' sh \
    .venv-deploy/bin/python scripts/deploy/aws/story.py "$PWD" "$programs" "$@"
