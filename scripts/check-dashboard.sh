#!/usr/bin/env bash
# Tests the web dashboard of a simulated job, and the card of a real job in JupyterLab, in a real browser; prints a line per
# check. Needs Node 20 with npm, and Chromium: apt-get install -y chromium. Installs npm packages into .tools-browser/.
#
#   scripts/check-dashboard.sh
#
# CHROMIUM names another browser, SHOTS a folder for screenshots, ONLY a word in the names of the checks to run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for program in node npm "${CHROMIUM:-chromium}"; do
    if ! command -v "$program" >/dev/null; then
        echo "check-dashboard: no $program here; on Debian: apt-get install -y nodejs npm chromium" >&2
        exit 1
    fi
done
CHROMIUM="$(command -v "${CHROMIUM:-chromium}")"
export CHROMIUM
[ -z "${SHOTS:-}" ] || mkdir -p "$SHOTS"

# Outside the sources: git ignores this folder of npm packages.
modules=.tools-browser
lock=crates/dashboard/browser/package-lock.json
if ! cmp -s "$lock" "$modules/installed.json"; then
    mkdir -p "$modules"
    cp crates/dashboard/browser/package.json "$lock" "$modules/"
    npm ci --prefix "$modules" --ignore-scripts --no-audit --no-fund --loglevel=error
    cp "$lock" "$modules/installed.json"
fi
cp crates/dashboard/browser/*.js "$modules/"

# All of the workspace, so that shared dependencies keep the features that they are built with.
cargo build --quiet --workspace --example fake --example report
examples="${CARGO_TARGET_DIR:-target}/debug/examples"
"$examples/report" "$modules/report.html"
node "$modules/check.js" "$examples/fake" "$modules/report.html"

venv=.venv-notebooks
if [ ! -x "$venv/bin/jupyter-lab" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -r scripts/notebooks/requirements.txt jupyterlab==4.6.6
fi
BATON_BIN="$(realpath "${CARGO_TARGET_DIR:-target}")/debug" PYTHONPATH="$PWD/python" \
    exec "$venv/bin/python" scripts/notebooks/card.py "$modules/notebook.js"
