#!/usr/bin/env bash
# Runs the end-to-end tests with the programs of the wheel in dist/, which are compiled otherwise than those of `make test`.
#
#   scripts/dist/test.sh [OPTION...]     options of `cargo nextest run`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

unpacked=$PWD/target/dist-tested
rm -rf "$unpacked"
python3 -m zipfile --extract dist/baton_train-*.whl "$unpacked"
chmod +x "$unpacked"/baton/_dist/bin/*
# The programs search PyTorch beside the package.
ln -s "$PWD"/.libtorch/* "$unpacked"
BATON_TEST_PROGRAMS=$unpacked/baton/_dist/bin \
    .tools/bin/cargo-nextest nextest run --workspace --filterset 'package(baton-tests)' "$@"
