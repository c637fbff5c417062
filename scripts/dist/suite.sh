# shellcheck shell=bash
# Commands in an older Debian or Ubuntu, which debootstrap makes below target/; sourced by scripts in the repository's root.

# in_suite SUITE PACKAGES COMMAND...: runs a command there, with this folder and Rust at the same paths. PACKAGES has commas
# between names.
in_suite() {
    local suite=$1 packages=$2 root=$PWD/target/dist-$1
    shift 2
    if [ ! -e "$root/.baton-dist" ]; then make_suite "$suite" "$packages" "$root" >&2; fi
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
    local suite=$1 packages=$2 root=$3 mirror
    if ! command -v debootstrap >/dev/null || [ "$(id -u)" -ne 0 ]; then
        echo "dist: --in needs debootstrap (apt-get install debootstrap), and root for chroot" >&2
        return 1
    fi
    # This machine's own mirror, which probably has both distributions.
    mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null || true; } |
        sed -nE 's/^(URIs: *|deb (\[.*\] )?)(http[^ ]*)\/debian\/?( .*)?$/\3/p' | head -1)
    rm -rf "$root"
    case $suite in
    focal | jammy | noble)
        # Debian does not have the keys of Ubuntu.
        debootstrap --no-check-gpg --variant=minbase --components=main,universe --include="$packages" "$suite" "$root" \
            "${mirror:-http://archive.ubuntu.com}/ubuntu"
        ;;
    *) debootstrap --variant=minbase --include="$packages" "$suite" "$root" "${mirror:-http://deb.debian.org}/debian" ;;
    esac
    touch "$root/.baton-dist"
}
