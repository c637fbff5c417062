#!/usr/bin/env bash
# Makes the wheel of baton-train in dist/: the Python package, with the three programs, recipes and digits.
#
#   scripts/dist/wheel.sh [--in SUITE]     as programs.sh, which builds the programs
#
# The name says which glibc the programs need: auditwheel reads it from their symbols. Needs pip and its index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly MAX_BYTES=$((40 * 1000 * 1000))

programs=$PWD/target/dist-out
stage=$PWD/target/dist-wheel
venv=$PWD/target/dist-venv

scripts/dist/programs.sh "$programs" "$@"

if ! cmp --quiet scripts/dist/requirements.txt "$venv/requirements.txt"; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r scripts/dist/requirements.txt
    cp scripts/dist/requirements.txt "$venv"
fi

rm -rf "$stage" && mkdir -p "$stage" dist
cp -r python/baton python/pyproject.toml python/README.md LICENSE "$stage"
find "$stage" -name __pycache__ -prune -exec rm -r {} +
cp -r "$programs" "$stage/baton/_dist"
cat >>"$stage/pyproject.toml" <<'END'

[project.scripts]
baton = "baton._launch:main"
baton-coordinator = "baton._launch:main"
baton-worker = "baton._launch:main"
END

# Times inside the wheel are those of the commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
"$venv/bin/python" -m build --wheel --no-isolation --outdir "$stage/dist" \
    --config-setting=--build-option=--plat-name=linux_x86_64 "$stage" >"$stage.log" 2>&1 || {
    cat "$stage.log" >&2
    exit 1
}
# PyTorch's own package brings these.
rm -f dist/baton_train-*.whl
PATH="$venv/bin:$PATH" auditwheel repair --exclude libtorch_cpu.so --exclude libc10.so --wheel-dir dist "$stage"/dist/*.whl
wheel=$(echo dist/baton_train-*.whl)
bytes=$(stat -c %s "$wheel")
[ "$bytes" -le $MAX_BYTES ] || {
    echo "wheel: $wheel has $bytes bytes, and at most $MAX_BYTES are wanted" >&2
    exit 1
}
echo "$wheel: $((bytes / 1000000)) MB"
