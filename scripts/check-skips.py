#!/usr/bin/env python3
"""Lists the skipped tests of a run, and fails if one of them must not be skipped.

    scripts/check-skips.py target/nextest/default/junit.xml      part of `make test`

Rust's tests pass or fail. One that cannot look here prints a line `test skipped: REASON` and returns. Which tests may
do so, and for which reasons, is in tests/skips.txt.
"""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ALLOWED = Path("tests/skips.txt")
SKIPPED = re.compile(r"^test skipped: (.*)$", re.M)


def allowed() -> list[tuple[str, str]]:
    """Each test that may be skipped, with the beginning of the reason."""
    entries = []
    for line in ALLOWED.read_text().splitlines():
        if line and not line.startswith("#"):
            test, _, reason = line.partition(": ")
            if not reason:
                sys.exit(f"check-skips: {ALLOWED}: {line!r} has no reason; write `TEST: BEGINNING OF THE REASON`")
            if subprocess.run(["git", "grep", "--quiet", "--word-regexp", f"fn {test}", "*.rs"]).returncode:
                sys.exit(f"check-skips: {ALLOWED}: there is no test {test}; remove the line")
            entries.append((test, reason))
    return entries


def skips(report: Path) -> tuple[int, list[tuple[str, str]]]:
    """The number of tests that ran, and each skip: the test and its reason."""
    found, tests = [], 0
    for case in ET.parse(report).iter("testcase"):
        tests += 1
        output = "\n".join(case.findtext(name, "") for name in ("system-out", "system-err"))
        found += [(case.get("name", ""), reason.strip()) for reason in SKIPPED.findall(output)]
    return tests, found


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        tests, found = skips(Path(sys.argv[1]))
    except (OSError, ET.ParseError) as error:
        sys.exit(f"check-skips: {sys.argv[1]}: {error}; run `make test`")
    may_skip = allowed()
    wrong = 0
    for test, reason in found:
        is_allowed = any(test == name and reason.startswith(text) for name, text in may_skip)
        wrong += not is_allowed
        print(f"{'skipped' if is_allowed else 'SKIPPED'}  {test}: {reason}")
    print(f"check-skips: {len(found)} skips in {tests} tests")
    if tests == 0:
        sys.exit("check-skips: no test ran")
    if wrong:
        sys.exit(f"check-skips: {wrong} of them are not in {ALLOWED}: give the machine what they need, or list them")


if __name__ == "__main__":
    main()
