#!/usr/bin/env bash
# Lints all shell scripts. Run by `make lint` and `make deploy-check`, after `make tools`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find scripts deploy .ci -type f \( -name '*.sh' -o -name '*.sbatch' -o -path '.ci/run' \) -print0 |
    xargs -0 .tools/bin/shellcheck
