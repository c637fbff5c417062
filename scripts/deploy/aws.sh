#!/usr/bin/env bash
# Tests jobs on EC2 from launch to removal, against a local AWS: see aws/story.py.
#
#   scripts/deploy/aws.sh [PROGRAMS] [single|several]
#
# Machines really boot, in containers of systemd-nspawn: that needs root, and a kernel with namespaces, overlays and
# loop devices. If these are missing, the script prints a message and exits with 77.
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
    echo "aws: the machines of this test cannot boot here; missing: ${missing[*]}" >&2
    exit 77
fi

# In a separate network and mount namespace, which end with the script; story.py ends its machines. Later mounts
# outside are not visible inside.
export PYTHONPATH=scripts/deploy/aws PYTHONDONTWRITEBYTECODE=1
exec unshare --net --mount --propagation private sh -c 'mount -t tmpfs tmpfs /run/netns 2>/dev/null || { mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns; }; exec "$@"' sh \
    .venv-deploy/bin/python scripts/deploy/aws/story.py "$PWD" "$programs" "$@"
