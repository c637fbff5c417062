#!/usr/bin/env python3
"""Runs all commands of docs/runbook.md in order, in one shell; commands that need AWS are only checked against the
help of the programs.

    scripts/deploy/runbook.py [PROGRAMS]
"""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
BOOK = REPOSITORY / "docs/runbook.md"
NEEDS_AWS = "<!-- needs AWS -->"
# Limit for all commands together; reached only when something is broken. The job of the page has no end until it is
# drained, so that nothing depends on how fast this machine is.
TIMEOUT_SECONDS = 1200


def blocks(text):
    """Returns (needs AWS, line number, commands) of every shell block."""
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        line = text.count("\n", 0, match.start()) + 2
        assert match[1] == "bash", f"docs/runbook.md:{line}: only bash blocks can be run"
        found.append((text[: match.start()].rstrip().endswith(NEEDS_AWS), line, match[2]))
    return found


def check_flags(programs, line, command):
    """Checks the name and flags of a command that is not run; returns whether it is one of Baton's."""
    words = shlex.split(command)
    if words[0] not in ("baton", "baton-worker", "baton-coordinator"):
        return False
    own = words[: words.index("--")] if "--" in words else words
    help_of = lambda path: subprocess.run([programs / own[0], *path, "--help"], capture_output=True, text=True)
    path, help = [], help_of([])
    # The help of each command lists its subcommands.
    while len(path) + 1 < len(own) and re.search(rf"^  {re.escape(own[len(path) + 1])} +\S", help.stdout, re.M):
        path.append(own[len(path) + 1])
        help = help_of(path)
    assert help.returncode == 0 and "Commands:" not in help.stdout, (
        f"docs/runbook.md:{line}: {command}: no such command"
    )
    for flag in [word for word in own if word.startswith("--")]:
        assert re.search(rf"(^|[ ,]){re.escape(flag)}(?![\w-])", help.stdout), (
            f"docs/runbook.md:{line}: {command}: no flag {flag}"
        )
    if "--" in words:
        check_flags(programs, line, shlex.join(["baton", *words[words.index("--") + 1 :]]))
    return True


def main():
    programs = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else REPOSITORY / "target/debug").resolve()
    found = blocks(BOOK.read_text())
    here = [(line, text) for needs_aws, line, text in found if not needs_aws]
    there = [
        (line + offset, command)
        for needs_aws, line, text in found
        if needs_aws
        for offset, command in enumerate(text.splitlines())
        if command.strip()
    ]
    assert here and there, "no commands were found in docs/runbook.md: the check or the page is wrong"
    ours = [check_flags(programs, line, command) for line, command in there]
    print(f"runbook: {sum(ours)} of {len(ours)} commands that need AWS are Baton's, with existing flags", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="baton-book-"))
    try:
        for name in ("assets", "recipes"):
            (folder / name).symlink_to(REPOSITORY / name)
        script = [f'export PATH="{programs}:$PATH"', "set -euo pipefail"]
        for line, text in here:
            script += [f'echo "docs/runbook.md:{line}"', text]
        start = time.time()
        # In a separate process group, so that all started processes end with the shell.
        shell = subprocess.Popen(
            ["bash", "-c", "\n".join(script)],
            cwd=folder,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = shell.communicate(timeout=TIMEOUT_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            # `baton up` ends the processes that it has started.
            os.killpg(shell.pid, signal.SIGTERM)
            try:
                output, _ = shell.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(shell.pid, signal.SIGKILL)
                output, _ = shell.communicate()
        if shell.returncode != 0:
            log = folder / "book.log"
            sys.exit(
                f"runbook: ended with {shell.returncode}:\n{output}\n{log.read_text()[-2000:] if log.exists() else ''}"
            )
        commands = sum(len(text.splitlines()) for _, text in here)
        print(f"runbook: {commands} commands ran here, one after the other, in {time.time() - start:.0f} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
