#!/bin/sh
# Puts together what an image gets, as it will lie there: programs, or libtorch for one kind of machine.
#
#   assemble.sh programs TARGET_DIR OUT    the three programs, stripped; recipes, digits, licence, authorities
#   assemble.sh cpu|cuda LIBTORCH OUT      of a .libtorch that scripts/setup.sh made
#
# A script of its own, so that scripts/deploy/container.sh checks what the Dockerfile does. Run at the top of the
# repository.
set -eu

fail() {
    printf 'assemble: %s\n' "$1" >&2
    exit 1
}

programs() {
    install -D -s -t "$out/opt/baton/bin" "$from/baton" "$from/baton-coordinator" "$from/baton-worker"
    install -m 755 deploy/container/health.sh "$out/opt/baton/bin/baton-health"
    # For a first try without data of one's own; the recipe names the data from here.
    install -D -m 644 -t "$out/opt/baton/recipes" recipes/*.toml
    install -D -m 644 -t "$out/opt/baton/recipes/base" recipes/base/*.toml
    install -D -m 644 -t "$out/opt/baton/assets/digits" assets/digits/*
    install -m 644 LICENSE "$out/opt/baton"
    # Whom to trust on the way to a bucket; slim images have no list.
    authorities=/etc/ssl/certs/ca-certificates.crt
    [ -s "$authorities" ] || fail "no $authorities here: install the package ca-certificates"
    install -D -m 644 "$authorities" "$out$authorities"
}

# Libraries keep their places to each other, by which they find each other.
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
        [ -e torch/lib/libnccl.so ] || fail "$from has no NCCL: make it with BATON_CUDA=1 scripts/setup.sh"
        # Links among them stay links.
        cp --parents --no-dereference torch/lib/*.so* nvidia/*/lib/*.so* "$to"
        # Python's half.
        rm "$to"/torch/lib/libtorch_python.so "$to"/torch/lib/libshm.so
        ;;
    esac
    # What a wheel's umask left.
    chmod -R u=rwX,go=rX "$to"
}

[ $# -eq 3 ] || fail "usage: assemble.sh programs|cpu|cuda FROM OUT"
from=$2 out=$3
[ -d "$from" ] || fail "there is no folder $from"
case $1 in
programs) programs ;;
cpu | cuda) libraries "$1" ;;
*) fail "unknown part '$1'; known: programs, cpu, cuda" ;;
esac
