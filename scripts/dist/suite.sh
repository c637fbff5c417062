# shellcheck shell=bash
# Commands in an older Debian or Ubuntu, which debootstrap makes below target/; sourced by scripts in the repository's root.
# DEBIAN_MIRROR and UBUNTU_MIRROR name other mirrors than the public ones, UBUNTU_KEYRING a file with Ubuntu's keys.

# Prints the first comment of the script, and ends it.
usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "scripts/dist/${0##*/}" >&2
    exit 2
}

# What compiling and installing need.
readonly SUITE_PACKAGES=ca-certificates,cmake,g++,make,nasm,python3,python3-venv

# in_suite SUITE COMMAND...: runs a command there, with this folder and Rust at the same paths.
in_suite() {
    local suite=$1 root=$PWD/target/dist-$1
    shift
    if [ ! -e "$root/.baton-dist" ]; then make_suite "$suite" "$root" >&2; fi
    # Mounts are this command's own, and end with it.
    # shellcheck disable=SC2016
    unshare --mount --propagation private bash -euc '
        root=$1
        shift
        for folder in "$1" "$2" "$3"; do
            mkdir -p "$root$folder"
            mount --bind "$folder" "$root$folder"
        done
        shift 2
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        exec chroot "$root" env --chdir="$@"
    ' bash "$root" "${CARGO_HOME:-$HOME/.cargo}" "${RUSTUP_HOME:-$HOME/.rustup}" "$PWD" "$@"
}

make_suite() {
    local suite=$1 root=$2 mirror options=()
    if ! command -v debootstrap >/dev/null || [ "$(id -u)" -ne 0 ]; then
        echo "dist: --in needs debootstrap (apt-get install debootstrap), and root for chroot" >&2
        return 1
    fi
    rm -rf "$root"
    case $suite in
    focal | jammy | noble)
        options=("--components=main,universe" "--keyring=${UBUNTU_KEYRING:-/usr/share/keyrings/ubuntu-archive-keyring.gpg}")
        mirror=${UBUNTU_MIRROR:-http://archive.ubuntu.com/ubuntu}
        ;;
    *)
        options=(--keyring=/usr/share/keyrings/debian-archive-keyring.gpg)
        mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
        ;;
    esac
    if [ ! -e "${options[-1]#--keyring=}" ]; then
        echo "dist: ${options[-1]#--keyring=} with the keys of $suite is missing: apt-get install debian-archive-keyring ubuntu-keyring" >&2
        return 1
    fi
    debootstrap --variant=minbase --include="$SUITE_PACKAGES" "${options[@]}" "$suite" "$root" "$mirror"
    touch "$root/.baton-dist"
}
