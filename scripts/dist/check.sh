#!/usr/bin/env bash
# Installs the wheel in dist/ into a new virtual environment beside PyTorch, and trains on the digits there.
#
#   scripts/dist/check.sh [--in SUITE]     with this machine's Python, or with that of an Ubuntu such as jammy (22.04, glibc
#                                          2.35), which debootstrap makes in target/dist-SUITE; needs root: suite.sh
#
# The last line is RESULT {...}: seconds from `pip install` to the first step.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/dist/suite.sh
. scripts/dist/suite.sh

case "$#:${1:-}" in
0: | 2:--in) ;;
*) usage ;;
esac
inside=(env)
if [ $# -eq 2 ]; then inside=(in_suite "$2"); fi

version=$("${inside[@]}" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
packages=target/dist-packages-$version
rm -rf "$packages"
platforms=()
# pip takes each tag literally.
for tag in manylinux_2_{5..28}_x86_64 manylinux{1,2010,2014}_x86_64; do platforms+=(--platform "$tag"); done
# Without CUDA, PyTorch needs only these of its gigabytes of dependencies: as in scripts/setup.sh.
python3 -m pip download --quiet --no-deps --only-binary :all: --python-version "$version" --implementation cp \
    "${platforms[@]}" --dest "$packages" \
    torch==2.11.0 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cupti==13.0.*' numpy safetensors
"${inside[@]}" python3 scripts/dist/check.py "$packages" dist
