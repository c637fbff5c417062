#!/usr/bin/env python3
"""Mutation check of the core: changes one operator, condition or return value at a time; a test must fail.

    scripts/mutants.py                                   all crates
    scripts/mutants.py baton-job --only divergence       mutants of one crate whose name matches this expression
    scripts/mutants.py baton-job --share 1/8             every eighth

cargo-mutants lists the mutants; .cargo/mutants.toml has the files, and what is left out with the reason. It would compile
the crate for each of a thousand mutants. Here all are in one build: a function with mutants chooses its body by the
environment variable MUTANT. Mutants that do not compile are removed, as cargo-mutants does with what it calls unviable.

The working tree is copied to target/mutants/ first, and only the copy is changed. Results: docs/measurements/mutants.md.
"""

import argparse
import filecmp
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CARGO_MUTANTS_VERSION = "27.1.0"

# The tests of each crate. The fastest run first: a mutant is done at the first failure.
TESTS = {
    # `scale` is left out: half a minute for each survivor, and few rules of its own.
    "baton-job": ["--lib", "--test", "simulation"],
    "baton-recipe": ["--lib"],
    "baton-checkpoint": [
        "--lib",
        "--test",
        "fence",
        "--test",
        "lifecycle",
        "--test",
        "frozen",
        "--test",
        "conformance",
    ],
    "baton-collectives": ["--lib", "--test", "suite"],
}

# Takes ten minutes in a build without optimisation; its smaller twin runs.
SKIPPED = "nothing_is_committed_after_the_fence_was_raised_and_abandoned_saves_were_pruned"

CHOICE = """
/// The mutant of this crate that runs; 0 if none.
pub fn chosen_mutant() -> u32 {
    static CHOSEN: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    let number = || std::env::var("MUTANT").ok()?.strip_prefix(concat!(env!("CARGO_PKG_NAME"), " "))?.parse().ok();
    *CHOSEN.get_or_init(|| number().unwrap_or(0))
}
"""


def target() -> Path:
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "mutants"


def cargo_mutants() -> Path:
    """Not one of the tools that setup installs everywhere."""
    program = ROOT / ".tools-mutants/bin/cargo-mutants"
    if not program.exists():
        print(f"mutants: compiling cargo-mutants {CARGO_MUTANTS_VERSION} into .tools-mutants/ (minutes)", flush=True)
        install = ["cargo", "install", "cargo-mutants", "--quiet", "--locked", "--version", CARGO_MUTANTS_VERSION]
        folders = ["--root", ROOT / ".tools-mutants", "--target-dir", target() / "tools"]
        subprocess.run([*install, *folders], check=True)
    return program


def copy(source: Path, to: Path) -> None:
    """A file that is the same keeps its time, so that cargo compiles nothing again; any other gets a new one."""
    if not to.exists() or not filecmp.cmp(source, to, shallow=False):
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, to)


class Tree:
    """A copy of the working tree in which one crate has all its mutants."""

    def __init__(self, crate: str, mutants: list[dict]) -> None:
        self.crate, self.mutants = crate, mutants
        self.folder = target() / "tree"
        self.package = self.folder / "crates" / crate.removeprefix("baton-")
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        names = {name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()}
        for name in names:
            copy(ROOT / name, self.folder / name)
        for path in self.folder.rglob("*"):
            if path.is_file() and str(path.relative_to(self.folder)) not in names:
                path.unlink()
        files = {mutant["file"] for mutant in mutants}
        self.lib = str((self.package / "src/lib.rs").relative_to(self.folder))
        self.originals = {file: (ROOT / file).read_text() for file in files | {self.lib}}

    def write(self, changed: dict[str, str]) -> None:
        """Writes all files, `changed` or as they are; files that stay the same keep their time."""
        for file, original in self.originals.items():
            text = changed.get(file, original)
            if (self.folder / file).read_text() != text:
                (self.folder / file).write_text(text)

    def span(self, file: str, span: dict) -> tuple[int, int]:
        lines = self.originals[file].split("\n")
        offset = lambda at: sum(len(line) + 1 for line in lines[: at["line"] - 1]) + at["column"] - 1
        return offset(span["start"]), offset(span["end"])

    def changed(self, mutant: dict, start: int, end: int) -> str:
        """The text from `start` to `end` with this mutant."""
        text, (at, to) = self.originals[mutant["file"]], self.span(mutant["file"], mutant["span"])
        return f"{text[start:at]} {mutant['replacement']} {text[to:end]}"

    def write_all(self, numbers: set[int]) -> None:
        functions = defaultdict(list)
        for number in sorted(numbers):
            mutant = self.mutants[number - 1]
            functions[mutant["file"], self.span(mutant["file"], mutant["function"]["span"])].append(number)
        texts = dict(self.originals)
        # From the end of each file, so that offsets stay valid.
        for (file, (start, end)), chosen in sorted(functions.items(), reverse=True):
            original = self.originals[file]
            start = original.index("{", original.index("fn ", start))
            arms = []
            for number in chosen:
                mutant = self.mutants[number - 1]
                is_body = mutant["genre"] == "FnValue"
                body = f"{{ {mutant['replacement']} }}" if is_body else self.changed(mutant, start, end)
                arms.append(f"\n// mutant {number}\n{number} => {body}\n")
            arms.append(f"\n// mutant 0\n_ => {original[start:end]}\n")
            choice = f"{{ match crate::chosen_mutant() {{{''.join(arms)}}} }}"
            texts[file] = texts[file][:start] + choice + texts[file][end:]
        texts[self.lib] += CHOICE
        self.write(texts)

    def write_single(self, number: int) -> None:
        mutant = self.mutants[number - 1]
        text = self.originals[mutant["file"]]
        if mutant["genre"] == "FnValue":
            mutant = {**mutant, "replacement": f"{{ {mutant['replacement']} }}"}
        self.write({mutant["file"]: self.changed(mutant, 0, len(text))})

    def mutant_at(self, file: str, line: int) -> int:
        """The mutant in whose body a line is."""
        for text in reversed((self.folder / file).read_text().split("\n")[:line]):
            if found := re.match(r"// mutant (\d+)", text):
                return int(found[1])
        return 0

    def compile(self) -> tuple[list[str] | None, set[int], str]:
        """The test programs, or the mutants that do not compile and the compiler's messages."""
        command = [
            "cargo",
            "test",
            "--no-run",
            "--quiet",
            "--package",
            self.crate,
            "--message-format=json",
            *TESTS[self.crate],
        ]
        fast_to_compile = {
            "CARGO_PROFILE_DEV_OPT_LEVEL": "0",
            "CARGO_PROFILE_DEV_DEBUG": "none",
            "CARGO_INCREMENTAL": "1",
        }
        environment = {**os.environ, **fast_to_compile, "CARGO_TARGET_DIR": str(target() / "build")}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        programs = [message["executable"] for message in messages if message.get("executable")]
        errors = [m["message"] for m in messages if m.get("message", {}).get("level") == "error"]
        unviable = set()
        for error in errors:
            # Where the error is; what it is compared with may be the body of another mutant.
            at = [
                self.mutant_at(span["file_name"], span["line_start"]) for span in error["spans"] if span["is_primary"]
            ]
            unviable |= set(at)
        rendered = "".join(error["rendered"] for error in errors) or done.stderr
        return (programs if done.returncode == 0 else None), unviable - {0}, rendered


class Check:
    """Runs the tests of a crate as each of its mutants."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.results, self.limits = tree, {}, {}

    def fails(self, program: str, number: int) -> str:
        """ "caught", "timeout", or nothing if the tests pass."""
        settings = {"BATON_SIM_HISTORIES": "1000", "RUST_BACKTRACE": "0", "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "1"}
        environment = {**settings, **os.environ, "MUTANT": f"{self.tree.crate} {number}"}
        # A mutant may compute, allocate or wait without end. Only processor time says so on a busy machine.
        cpu, wall = self.limits.get(program, (600, 600))
        command = ["prlimit", f"--cpu={cpu}", f"--as={8 << 30}", program, "--quiet", "--skip", SKIPPED]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            code = subprocess.run(command, cwd=self.tree.package, env=environment, timeout=wall, **quiet).returncode
        except subprocess.TimeoutExpired:
            return "timeout"
        return "timeout" if code in (-signal.SIGXCPU, -signal.SIGKILL) else "caught" if code != 0 else ""

    def run(self, number: int, programs: list[str]) -> None:
        fastest_first = sorted(programs, key=lambda program: self.limits.get(program, (600, 600))[0])
        result = next(filter(None, (self.fails(program, number) for program in fastest_first)), "missed")
        self.results[number] = result
        if result == "missed":
            print(f"missed: {self.tree.mutants[number - 1]['name']}", flush=True)

    def baseline(self, programs: list[str]) -> None:
        used = lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        for program in programs:
            cpu, wall = used(), time.monotonic()
            if self.fails(program, 0):
                sys.exit(f"mutants: {program} fails without a mutant: run `cargo test -p {self.tree.crate}`")
            self.limits.setdefault(program, (int(5 + 5 * (used() - cpu)), 60 + 20 * (time.monotonic() - wall)))

    def all(self, numbers: set[int], jobs: int) -> None:
        # Outside of a function, or of a type that differs with the body.
        is_single = lambda mutant: not mutant["function"] or "impl " in mutant["function"]["return_type"]
        singles = {number for number in numbers if is_single(self.tree.mutants[number - 1])}
        together = numbers - singles
        while True:
            self.tree.write_all(together)
            programs, unviable, messages = self.tree.compile()
            if programs is not None:
                break
            if not unviable & together:
                sys.exit(f"mutants: {self.tree.crate} does not compile:\n{messages}")
            self.results |= dict.fromkeys(unviable & together, "unviable")
            together -= unviable
        print(f"mutants: {self.tree.crate}: {len(together)} mutants in one build, {len(singles)} alone", flush=True)
        self.baseline(programs)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda number: self.run(number, programs), sorted(together)))
        for number in sorted(singles):
            self.tree.write_single(number)
            programs, _, _ = self.tree.compile()
            if programs is None:
                self.results[number] = "unviable"
            else:
                self.run(number, programs)


def report(check: Check) -> None:
    kinds = ["caught", "timeout", "missed", "unviable"]
    counts = defaultdict(Counter)
    for number, result in check.results.items():
        counts[check.tree.mutants[number - 1]["file"]][result] += 1
    print(f"\n| file | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for file, count in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        print(f"| {file} | {' | '.join(str(count[kind]) for kind in kinds)} |")
    lines = [
        f"{result}: {check.tree.mutants[number - 1]['name']}\n" for number, result in sorted(check.results.items())
    ]
    (target() / f"{check.tree.crate}.txt").write_text("".join(lines))
    print(f"mutants: each result is in {target() / check.tree.crate}.txt\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crates", nargs="*", metavar="CRATE", help=f"of {', '.join(TESTS)}; all if absent")
    parser.add_argument("--only", default="", metavar="REGEX", help="mutants whose name matches")
    parser.add_argument("--share", default="0/1", metavar="K/N", help="every Nth mutant, from the Kth on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at the same time")
    arguments = parser.parse_args()
    if unknown := set(arguments.crates) - set(TESTS):
        parser.error(f"{', '.join(sorted(unknown))}: the crates are {', '.join(TESTS)}")
    first, step = map(int, arguments.share.split("/"))
    program = cargo_mutants()
    for crate in arguments.crates or TESTS:
        command = [program, "mutants", "--list", "--json", "--package", crate]
        listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        mutants = json.loads(listed.stdout)
        named = [number for number, mutant in enumerate(mutants, 1) if re.search(arguments.only, mutant["name"])]
        check = Check(Tree(crate, mutants))
        check.all(set(named[first::step]), arguments.jobs)
        report(check)


if __name__ == "__main__":
    main()
