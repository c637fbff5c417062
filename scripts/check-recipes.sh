#!/usr/bin/env bash
# Checks that each recipe says the truth about itself: it is accepted, or, where its first line says
# `# not runnable yet`, it is refused for just that reason.
#
#   scripts/check-recipes.sh target/debug/baton
set -euo pipefail
baton="$(realpath "${1:?usage: check-recipes.sh PATH/TO/baton}")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
shopt -s nullglob

recipes=(recipes/*.toml)
bad=0
waiting=0
for recipe in "${recipes[@]}"; do
    code=0
    words="$("$baton" recipe check "$recipe" 2>&1 </dev/null)" || code=$?
    first_line="$(head -n 1 "$recipe")"
    complaint=
    if [[ "$first_line" != *"# not runnable yet"* ]]; then
        [ "$code" -eq 0 ] || complaint="is refused (exit code $code)"
    elif [ "$code" -eq 0 ]; then
        complaint="is accepted: remove '# not runnable yet' from its first line"
    elif [[ "$words" != *"not implemented yet"* ]]; then
        complaint="is refused for another reason than 'not implemented yet' (exit code $code)"
    else
        waiting=$((waiting + 1))
    fi
    if [ -n "$complaint" ]; then
        bad=$((bad + 1))
        printf 'recipes: %s %s\n' "$recipe" "$complaint"
        printf '%s\n' "$words" | sed 's/^/    /'
    fi
done

echo "recipes: ${#recipes[@]} checked, $waiting not runnable yet, $bad wrong"
[ "${#recipes[@]}" -gt 0 ] && [ "$bad" -eq 0 ]
