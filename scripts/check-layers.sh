#!/usr/bin/env bash
# Checks what deny.toml cannot express: that some crates do not depend on a library, even through another crate.
# deny.toml restricts libraries to one crate; this keeps other crates free of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

status=0

# must_not_reach CRATE LIBRARY...: normal dependencies only, since tests may use anything.
must_not_reach() {
    local crate=$1 library tree
    shift
    tree="$(cargo tree --locked --quiet -p "$crate" -e normal --prefix none)"
    for library in "$@"; do
        if grep -q "^$library v" <<<"$tree"; then
            echo "layers: $crate reaches $library; see: cargo tree -p $crate -i $library -e normal"
            status=1
        fi
    done
}

# The rules are pure code: no sockets, no runtime, no files, no tensors, and no clock.
must_not_reach baton-model baton-recipe tokio tonic prost tch torch-sys cudarc memmap2 object_store tracing
must_not_reach baton-program baton-job tokio tonic prost tch torch-sys cudarc memmap2 object_store tracing
must_not_reach baton-language baton-job tokio tonic prost tch torch-sys cudarc memmap2 object_store tracing
must_not_reach baton-recipe baton-job tokio tonic prost tch torch-sys cudarc memmap2 object_store tracing
must_not_reach baton-job tokio tonic prost tch torch-sys cudarc memmap2 object_store tracing
must_not_reach baton-plan tokio tonic prost tch torch-sys cudarc memmap2 object_store tracing
# Data and checkpoints can be read without libtorch or a GPU.
must_not_reach baton-proto torch-sys cudarc
must_not_reach baton-data tonic torch-sys cudarc
must_not_reach baton-text baton-job tonic torch-sys cudarc
must_not_reach baton-checkpoint tonic torch-sys cudarc
# These run on machines that have neither.
must_not_reach baton-coordinator torch-sys cudarc
must_not_reach baton-cli torch-sys cudarc
must_not_reach baton-access baton-job torch-sys cudarc
must_not_reach baton-data baton-job
must_not_reach baton-telemetry torch-sys cudarc
must_not_reach baton-dashboard torch-sys cudarc

[ "$status" -ne 0 ] || echo "layers: no crate depends on a library that it must not use"
exit "$status"
