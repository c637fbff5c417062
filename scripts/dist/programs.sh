#!/usr/bin/env bash
# Builds the three programs as they are published: optimised, without symbols, without paths of this machine.
#
#   scripts/dist/programs.sh OUT              with this machine's compilers: for its glibc and newer ones
#   scripts/dist/programs.sh OUT --in SUITE   with those of a Debian that debootstrap makes in target/dist-SUITE, such as
#                                             bullseye (glibc 2.31); needs root: suite.sh
#
# OUT gets bin, recipes, assets, LICENSE, NOTICES with the licences of linked libraries, and `glibc`: the oldest version
# that has all symbols of the programs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/dist/suite.sh
. scripts/dist/suite.sh

case "$#:${2:-}" in
1: | 3:--in) ;;
*) usage ;;
esac
out=$1 suite=${3:-}

cargo_home=${CARGO_HOME:-$HOME/.cargo}
rustup_home=${RUSTUP_HOME:-$HOME/.rustup}
target=$PWD/target/dist-build${suite:+-$suite}
# Names of files in panics and in errors of C++.
maps=("$PWD=/baton" "$cargo_home=/cargo" "$rustup_home=/rustup")
build=(env CARGO_HOME="$cargo_home" RUSTUP_HOME="$rustup_home" CARGO_TARGET_DIR="$target" CARGO_INCREMENTAL=0
    PATH="$cargo_home/bin:/usr/local/bin:/usr/bin:/bin" HOME="$HOME"
    # PyTorch is beside the package `baton`, which has the programs in _dist/bin.
    BATON_RPATH="\$ORIGIN/../../../torch/lib"
    RUSTFLAGS="${maps[*]/#/--remap-path-prefix=}"
    CFLAGS="${maps[*]/#/-ffile-prefix-map=}" CXXFLAGS="${maps[*]/#/-ffile-prefix-map=}"
    BATON_REVISION="$(git rev-parse --short=12 HEAD)"
    cargo build --locked --offline --profile dist --workspace --bins)

cargo fetch --locked
if [ -n "$suite" ]; then in_suite "$suite" "${build[@]}"; else "${build[@]}"; fi

rm -rf "$out"
deploy/container/assemble.sh folder "$target/dist" "$out"
objdump -T "$out"/bin/* | grep -o 'GLIBC_2\.[0-9]*' | sort -uV | tail -n 1 | sed 's/^GLIBC_//' >"$out/glibc"

scripts/dist/notices.sh "$out/NOTICES"
