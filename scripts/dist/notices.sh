#!/usr/bin/env bash
# Writes the licences of all libraries that are linked into the programs: wheels and images have them.
#
#   scripts/dist/notices.sh FILE
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly CARGO_ABOUT=0.9.3

[ $# -eq 1 ] || { echo "usage: notices.sh FILE" >&2 && exit 2; }

about=$PWD/target/dist-tools/bin/cargo-about
if [ "$("$about" --version 2>/dev/null)" != "cargo-about $CARGO_ABOUT" ]; then
    cargo install --quiet --locked --version "$CARGO_ABOUT" --features cli --root target/dist-tools cargo-about
fi
cargo fetch --locked
"$about" about generate --offline --locked --fail --workspace --config scripts/dist/about.toml \
    --output-file "$1" scripts/dist/about.hbs
