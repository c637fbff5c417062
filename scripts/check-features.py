#!/usr/bin/env python3
"""Checks that programs and tests use the same features of shared crates.

    scripts/check-features.py

Otherwise cargo compiles such a crate twice, and everything that depends on it: once for `make run` and again for
`make test`. To fix it, list the features that the tests need in the dependencies of tests/Cargo.toml: no program links
that crate, so nothing more is built, but cargo unites its features with all the others'.
"""

import subprocess
import sys


def features(*edges: str) -> set[str]:
    """Each crate of the dependency tree with its features, as `name version features`."""
    command = ["cargo", "tree", "--workspace", "--locked", "--prefix", "none", "--no-dedupe", "--format", "{p} {f}"]
    listed = subprocess.run([*command, "--edges", ",".join(edges)], capture_output=True, text=True)
    if listed.returncode != 0:
        sys.exit(f"check-features: cargo tree failed:\n{listed.stderr}")
    return set(listed.stdout.splitlines())


def main() -> None:
    programs, tests = features("normal"), features("normal", "dev")
    if not programs:
        sys.exit("check-features: cargo tree listed nothing")
    differing = sorted(programs - tests)
    for crate in differing:
        name, version, *_ = crate.split()
        of_tests = [other for other in sorted(tests) if other.startswith(f"{name} {version} ")]
        print(f"check-features: programs use {crate}\n                tests use {' and '.join(of_tests) or 'none'}")
    if differing:
        sys.exit("check-features: name these features in tests/Cargo.toml, among [dependencies]")


if __name__ == "__main__":
    main()
