#!/usr/bin/env python3
"""Counts the lines of Rust code in the programs: no tests, no examples, no benches, nothing generated.

    scripts/production-lines.py               the working tree
    scripts/production-lines.py --at 7d60ec3  a commit

"Lines" are all lines of that code; "code" leaves out blank lines and lines that hold only a comment. Left out are the
items behind #[cfg(test)], with the files of such modules, the folders tests/, examples/ and benches/, and the crates
that only tests use. Generated code is in target/, which git does not list.
"""

import argparse
import re
import subprocess
from collections import Counter
from pathlib import PurePosixPath as Path

# Crates that are in no program.
TEST_CRATES = {"tests", "fuzz", "crates/gpu/fake", "crates/s3/fake"}
TEST_FOLDERS = {"tests", "examples", "benches"}

# Comments, strings and characters: their braces, quotes and `//` are not Rust syntax.
TEXT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\b[bc]?r(?P<hashes>#*)".*?"(?P=hashes)|[bc]?"(?:\\.|[^"\\])*"|b?'(?:\\.[^'\n]*|[^\\'\n])'""",
    re.S,
)
TEST_ITEM = re.compile(r"^[ \t]*#\[cfg\((?:test|all\(test\b[^\n]*)\)\]\s*", re.M)
ITEM = re.compile(
    r"(?:#\[[^\]]*\]\s*)*(?:pub(?:\([a-z ]+\))?\s+)?(?:async|const|enum|fn|impl|macro_rules|mod|static|struct|trait|type|unsafe|use)\b"
)
TEST_MODULE = re.compile(r"(?:#\[[^\]]*\]\s*)*(?:pub(?:\([a-z ]+\))?\s+)?mod\s+(\w+)\s*;")


def git(*arguments: str, text: str | None = None) -> str:
    return subprocess.run(["git", *arguments], input=text, capture_output=True, text=True, check=True).stdout


def sources(revision: str | None) -> dict[Path, str]:
    """All Rust files by path."""
    if revision is None:
        listed = git("ls-files", "-co", "--exclude-standard", "*.rs").splitlines()
        return {Path(name): open(name, encoding="utf-8").read() for name in listed}
    listed = [name for name in git("ls-tree", "-r", "--name-only", revision).splitlines() if name.endswith(".rs")]
    return {Path(name): git("show", f"{revision}:{name}") for name in listed}


def without_text(code: str) -> str:
    """The same lines with comments removed and strings emptied, so that all remaining braces are Rust syntax."""

    def blank(match: re.Match) -> str:
        kept = "\n" * match[0].count("\n")
        return kept if match[0].startswith(("//", "/*")) else f'"{kept}"'

    return TEXT.sub(blank, code)


def end_of_item(code: str, start: int) -> int:
    """The end of the item that begins at `start`: its semicolon or closing brace, or the comma of a field or an arm."""
    ends = ";" if ITEM.match(code, start) else ";,"
    depth = 0
    for position in range(start, len(code)):
        letter = code[position]
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if depth < 0:
                return position
            if depth == 0 and letter == "}":
                return position + 1
        elif letter in ends and depth == 0:
            return position + 1
    return len(code)


def module_files(parent: Path, name: str) -> tuple[Path, Path]:
    """The file and the folder of a module that `parent` declares."""
    folder = parent.parent if parent.name in ("lib.rs", "main.rs", "mod.rs") else parent.with_suffix("")
    return folder / f"{name}.rs", folder / name


def count(files: dict[Path, str]) -> dict[str, Counter]:
    crates = [path.parts[: path.parts.index("src")] for path in files if "src" in path.parts]
    crates = {"/".join(parts) for parts in crates} - TEST_CRATES
    bare = {path: without_text(text) for path, text in files.items()}
    hidden: list[Path] = []
    totals: dict[str, Counter] = {crate: Counter() for crate in crates}
    kept: dict[Path, list[int]] = {}
    for path, code in bare.items():
        lines = set(range(code.count("\n") + (not code.endswith("\n"))))
        for match in TEST_ITEM.finditer(code):
            end = end_of_item(code, match.end())
            lines -= set(range(code.count("\n", 0, match.start()), code.count("\n", 0, end) + 1))
            if module := TEST_MODULE.match(code, match.end()):
                hidden += module_files(path, module[1])
        kept[path] = sorted(lines)
    for path, lines in kept.items():
        crate = next((c for c in sorted(crates, key=len, reverse=True) if path.is_relative_to(c)), None)
        if crate is None or any(path == one or path.is_relative_to(one) for one in hidden):
            continue
        if TEST_FOLDERS & set(path.relative_to(crate).parts[:1]):
            continue
        code = bare[path].split("\n")
        totals[crate]["lines"] += len(lines)
        totals[crate]["code"] += sum(1 for line in lines if code[line].strip())
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="REVISION", help="a commit instead of the working tree")
    totals = count(sources(parser.parse_args().at))
    rows = sorted(totals.items(), key=lambda row: -row[1]["lines"])
    rows.append(("total", sum(totals.values(), Counter())))
    print(f"{'crate':24}{'lines':>8}{'code':>8}")
    for crate, numbers in rows:
        print(f"{crate:24}{numbers['lines']:8,}{numbers['code']:8,}")


if __name__ == "__main__":
    main()
