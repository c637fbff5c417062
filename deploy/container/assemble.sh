#!/bin/sh
# Assembles the files of an image with their paths: programs, or libtorch for one kind of machine. Wheels get the folder
# with the programs too.
#
#   assemble.sh folder TARGET_DIR OUT      the three programs, stripped; recipes, digits, licence
#   assemble.sh programs TARGET_DIR OUT    this folder as opt/baton, with the health check; authorities
#   assemble.sh cpu|cuda LIBTORCH OUT      of a .libtorch that scripts/setup.sh made
#
# A separate script, so that scripts/deploy/container.sh tests what the Dockerfile does. Run it in the repository's
# root.
set -eu

fail() {
    printf 'assemble: %s\n' "$1" >&2
    exit 1
}

# folder OUT
folder() {
    install -D -s -t "$1/bin" "$from/baton" "$from/baton-coordinator" "$from/baton-worker"
    # For a first try without your own data: the programs find these by name, from any folder.
    install -D -m 644 -t "$1/recipes" recipes/*.toml
    install -D -m 644 -t "$1/recipes/base" recipes/base/*.toml
    install -D -m 644 -t "$1/assets/digits" assets/digits/*
    install -m 644 LICENSE "$1"
}

programs() {
    folder "$out/opt/baton"
    install -m 755 deploy/container/health.sh "$out/opt/baton/bin/baton-health"
    # Trusted certificate authorities for buckets; slim images have no list.
    authorities=/etc/ssl/certs/ca-certificates.crt
    [ -s "$authorities" ] || fail "no $authorities here: install the package ca-certificates"
    install -D -m 644 "$authorities" "$out$authorities"
}

# Libraries keep their relative paths, by which they find each other.
libraries() {
    to="$(mkdir -p "$out/opt/baton/libtorch" && cd "$out/opt/baton/libtorch" && pwd)"
    cd "$from"
    cp --parents torch-*.dist-info/licenses/* nvidia_*.dist-info/licenses/* "$to"
    case $1 in
    cpu)
        cp --parents torch/lib/libtorch_cpu.so torch/lib/libc10.so torch/lib/libgomp.so.1 \
            nvidia/cu13/lib/libcudart.so.13 nvidia/cu13/lib/libcupti.so.13 "$to"
        ;;
    cuda)
        [ -e torch/lib/libnccl.so ] || fail "$from has no NCCL: create it with BATON_CUDA=1 scripts/setup.sh"
        # Links between them are kept as links.
        cp --parents --no-dereference torch/lib/*.so* nvidia/*/lib/*.so* "$to"
        # The libraries for Python.
        rm "$to"/torch/lib/libtorch_python.so "$to"/torch/lib/libshm.so
        ;;
    esac
    # Permissions in wheels depend on the umask of their build.
    chmod -R u=rwX,go=rX "$to"
}

[ $# -eq 3 ] || fail "usage: assemble.sh folder|programs|cpu|cuda FROM OUT"
from=$2 out=$3
[ -d "$from" ] || fail "no folder $from"
case $1 in
folder) folder "$out" ;;
programs) programs ;;
cpu | cuda) libraries "$1" ;;
*) fail "unknown part '$1'; known: folder, programs, cpu, cuda" ;;
esac
