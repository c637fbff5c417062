#!/usr/bin/env python3
"""Checks the words of the repository: no odd ones, and one meaning for each name.

    scripts/check-words.py            part of `make lint`
    scripts/check-words.py --names    also lists every name that several crates use

A word of ODD may stand nowhere in code, docs or output: comments, strings and parts of identifiers count. A type or
constant may have one name in several crates only if it is in SAME or DIFFERENT below, with the reason.
The glossary of docs/architecture.md has the words to use.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# Each with what to write in its place.
ODD = {
    "told": "sent, reported, logged",
    "glance": "poll, look",
    "whom": "that, which",
    "unjudged": "pending",
    "condemned": "invalidated",
    "standing": "state, status",
    "agenda": "training plan",
    "heard": "received, reported",
    "patience": "timeout",
    "seat": "assignment",
    "forgive": "reset",
    "whose it is": "who owns it",
    "be it": "whether",
    "of late": "recently",
    "as yet": "yet",
}

# Paths in which a word may stand, with the reason.
ALLOWED = {
    "patience": (
        r"recipes?/|docs/recipes\.md|docs/runbook\.md|docs/coming-from\.md|crates/recipe/|crates/trainer/src/inputs\.rs|tests/",
        "the recipe key limits.patience, as in Keras",
    ),
}

# Not ours to word, or history.
SKIPPED = re.compile(
    r"LICENSE|(.*/)?Cargo\.lock|CHANGELOG\.md|tests/compat/|assets/|scripts/check-words\.py|.*\.(beton|png|safetensors|json|ico)"
)

# Names that several crates use in one meaning.
SAME = {
    "Args": "the arguments of a command, for clap",
    "Column": "a column of a table",
    "Command": "the subcommands of a command, for clap",
    "Dtype": "the type of the elements of an array",
    "Error": "what can go wrong in the crate, as its users write it: `baton_data::Error`",
    "LOCK_POLL_INTERVAL": "time between two tries to lock a file",
    "Prices": "dollars per hour of a machine",
    "STATUS_POLL_INTERVAL": "time between two requests for a job's status",
}

# Names that several crates use in different meanings; at most five.
DIFFERENT: dict[str, str] = {
    "Item": "one sample to be written; one thing of a followed stream",
    "Machine": "a running instance of a job; a type of machine with its price",
    "VERSION": "of the programs; of a file format",
}

ITEM = re.compile(
    r"^[ \t]*(?:pub(?:\([a-z: ]+\))?[ \t]+)?(?:struct|enum|trait|type|union|const|static)[ \t]+([A-Z]\w*)", re.M
)


def ours() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, check=True
    ).stdout.decode()
    return [Path(name) for name in listed.split("\0") if name and not SKIPPED.fullmatch(name) and Path(name).is_file()]


def pattern(word: str) -> re.Pattern:
    """Finds a word alone and as a part of an identifier: `told`, `was_told`, `TOLD`, `ToldError`."""
    first, rest = re.escape(word[0]), re.escape(word[1:])
    alone = f"(?<![A-Za-z])(?i:{first}{rest})(?![a-z])"
    inside = f"(?<=[a-z]){first.upper()}{rest}(?![a-z])"
    return re.compile(f"{alone}|{inside}")


def odd_words(files: list[Path]) -> list[str]:
    patterns = {word: pattern(word) for word in ODD}
    found = []
    for path in files:
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            for word, shape in patterns.items():
                allowed = word in ALLOWED and re.search(ALLOWED[word][0], str(path))
                if not allowed and shape.search(line):
                    found.append(f"{path}:{number}: `{word}`; write: {ODD[word]}")
    return found


def crate_of(path: Path) -> str:
    parts = path.parts
    depth = 3 if parts[0] == "crates" and parts[2] == "fake" else 2 if parts[0] == "crates" else 1
    return "/".join(parts[:depth])


def names(files: list[Path]) -> dict[str, set[str]]:
    """Types and constants with the crates that declare them, tests left out."""
    crates: dict[str, set[str]] = defaultdict(set)
    for path in files:
        is_test = {"tests", "examples", "benches", "fuzz"} & set(path.parts) or path.stem in ("tests", "testing")
        if path.suffix != ".rs" or is_test:
            continue
        code = re.split(r"^#\[cfg\(test\)\]\nmod \w+ \{", path.read_text(), flags=re.M)[0]
        # An associated type or constant belongs to a trait, which has the name.
        code = re.sub(r"^impl\b.*?^\}", "", code, flags=re.M | re.S)
        for name in ITEM.findall(code):
            crates[name].add(crate_of(path))
    return {name: where for name, where in crates.items() if len(where) > 1}


def main() -> None:
    files = ours()
    failures = odd_words(files)
    shared = names(files)
    for name, where in sorted(shared.items()):
        reason = SAME.get(name) or DIFFERENT.get(name)
        if "--names" in sys.argv:
            print(f"{name}: {', '.join(sorted(where))}: {reason or 'unexplained'}")
        if not reason:
            failures.append(f"{name}: declared in {', '.join(sorted(where))}: give them names of their own")
    if len(DIFFERENT) > 5:
        failures.append(f"{len(DIFFERENT)} names have several meanings; five are the most")
    print(*failures, sep="\n")
    unused = [name for name in [*SAME, *DIFFERENT] if name not in shared]
    if unused:
        sys.exit(f"words: no longer shared, remove from the list: {', '.join(unused)}")
    if failures:
        sys.exit(f"words: {len(failures)} to mend")
    print(
        f"words: {len(files)} files, {len(shared)} names in several crates, {len(DIFFERENT)} of them with several meanings"
    )


if __name__ == "__main__":
    main()
